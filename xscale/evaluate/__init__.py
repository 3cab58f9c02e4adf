"""Evaluation of a run: losses, tasks, translations, and accuracy against compute."""
