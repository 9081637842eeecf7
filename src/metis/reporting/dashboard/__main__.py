"""`python -m metis.reporting.dashboard FOLDER DESCRIPTOR`: the dashboard beside a run, ended by the end of stdin."""

import sys
from pathlib import Path

from metis.reporting.dashboard.server import serve_until_stdin_ends

if __name__ == "__main__":
    serve_until_stdin_ends(Path(sys.argv[1]), int(sys.argv[2]))
