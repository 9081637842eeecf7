def disable_progress_bar():
    """There is none."""
