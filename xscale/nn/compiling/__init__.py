"""Graph breaks and properties that torch.compile can trace."""
