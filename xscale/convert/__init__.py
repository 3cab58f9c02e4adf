"""Checkpoints of other libraries: what of theirs is ours one to one, under which names, and how equal logits are."""
