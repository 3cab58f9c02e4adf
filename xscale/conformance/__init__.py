"""Conformance: what a part declares in its traits, held against what it does, for parts of xscale and of plugins."""
