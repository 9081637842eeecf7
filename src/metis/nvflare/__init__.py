"""Scripts of NVFlare's Client API run under Metis, unchanged."""
