"""Keys of a config as text: what there is, what is set, and overrides."""
