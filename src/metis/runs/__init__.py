"""A run as data: its events, what is folded from them, and what is kept on disk."""
