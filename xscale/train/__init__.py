"""The loop: state, step, evaluation, generation, stopping and going on."""
