"""Facts about the nodes of a job, and the checks before it starts."""
