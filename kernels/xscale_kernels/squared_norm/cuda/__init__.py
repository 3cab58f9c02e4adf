"""squared_norm in CUDA C++."""
