"""One TOML file describes an experiment; it is checked whole before anything starts."""
