"""Puts this folder's own module on the path: `from asked import Asked, all_requests, requests`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
