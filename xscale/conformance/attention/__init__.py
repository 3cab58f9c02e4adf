"""Checks of attention cores and of the mixers around them."""
