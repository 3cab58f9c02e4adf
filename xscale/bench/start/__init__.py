"""Benchmark of starts: the time from the command to the first step, new and resumed, and what it is spent on."""
