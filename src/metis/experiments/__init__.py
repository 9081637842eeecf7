"""Experiments: a file becomes a federation, a federation runs, runs are compared."""
