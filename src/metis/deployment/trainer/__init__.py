"""The child process in which a site's code runs."""
