"""One optimizer step: gradients of micro-batches, the decision about them, clipping and update, averages and biases."""
