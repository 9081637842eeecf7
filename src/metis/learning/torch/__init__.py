"""The PyTorch engine; the only package that imports torch."""
