"""Sharded parameters: over tp and ep by their axes, over data-parallel ranks by ZeRO."""
