"""AdamW in CUDA C++."""
