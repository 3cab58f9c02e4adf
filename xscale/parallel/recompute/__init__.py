"""Activation checkpointing and offload: computed again or moved to the host instead of kept for backward."""
