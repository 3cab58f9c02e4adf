"""Timing and the description of the machine, which all benchmarks share."""
