"""One optimizer step, and the micro-batches that it reads."""
