"""Slurm: what is asked of it, the script that it runs, what it says about its queue."""
