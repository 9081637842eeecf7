"""Experiment trackers that a run can also be logged to: CSV, TensorBoard, MLflow, Weights & Biases."""
