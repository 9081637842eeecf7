"""`python -m metis.reporting.dashboard FOLDER DESCRIPTOR`: a dashboard in the background, ended with stdin."""

import sys
from pathlib import Path

from metis.reporting.dashboard.server import serve_until_stdin_ends

if __name__ == "__main__":
    serve_until_stdin_ends(Path(sys.argv[1]), int(sys.argv[2]))
