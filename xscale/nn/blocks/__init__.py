"""Blocks of sublayers on the residual stream, and the stack of them."""
