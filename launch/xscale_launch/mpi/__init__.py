"""Start ranks with mpirun or srun, and be such a rank."""
