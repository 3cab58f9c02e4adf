"""Tools on checkpoints without a model: list, show, verify, compare, prune, consolidate."""
