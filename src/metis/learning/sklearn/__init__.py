"""The scikit-learn engine; the only package that imports sklearn."""
