"""Certificates: who may take part, and who is speaking."""
