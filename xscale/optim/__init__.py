"""Optimizers over plain local tensors, learning-rate schedules, and clipping. Nothing here knows of ranks."""
