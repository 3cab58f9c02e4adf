"""Generation of text with a run's model."""
