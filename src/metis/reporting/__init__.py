"""Figures, reports and what a terminal shows, all from finished or running runs."""
