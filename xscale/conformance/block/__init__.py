"""Checks of what a block has beside its mixer: feed-forward parts, norms and residual streams."""
