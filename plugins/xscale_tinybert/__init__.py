"""Data augmentation of TinyBERT (Jiao et al. 2020) for the recipe `tinybert_task`; xscale imports it nowhere."""
