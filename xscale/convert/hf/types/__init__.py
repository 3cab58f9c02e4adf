"""Tables of the model types of transformers, by families."""
