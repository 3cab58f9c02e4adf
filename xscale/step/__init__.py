"""Micro-batches of a step and their reduced gradients, which training, plans and measurements have in common."""
