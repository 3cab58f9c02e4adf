"""Norms: x -> x, by statistics of a token or of a batch."""
