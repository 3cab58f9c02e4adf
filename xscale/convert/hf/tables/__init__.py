"""Tables of a `model_type`: keys of config.json and names of tensors, each table read in both directions."""
