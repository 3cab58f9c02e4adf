"""Starts training on a laptop, under Slurm or under MPI, and looks after what it started. Standard library only."""
