"""Registries, config and errors: what every other package stands on. Nothing here imports torch."""
