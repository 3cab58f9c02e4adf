"""Observers that send what they are given to TensorBoard, Weights & Biases or MLflow."""
