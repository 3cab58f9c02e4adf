"""What a model costs: parameters, FLOPs, the device's ceiling."""
