"""A run on disk and in memory: its folder, state, data, weights and parts."""
