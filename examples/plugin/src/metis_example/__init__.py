"""What this package adds to Metis; each module registers itself."""
