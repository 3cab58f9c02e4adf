"""Heads: from hidden states to logits, losses and scores."""
