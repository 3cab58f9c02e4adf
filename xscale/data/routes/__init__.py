"""Routes of tokens through mixtures of experts on disk: recorded, imported from other engines, and looked up."""
