"""Puts this folder's own module on the path: `from server_run import children_of`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
