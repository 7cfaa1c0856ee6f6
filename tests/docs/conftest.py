"""Puts the docs tests' own modules on the path: `from blocks import read_blocks`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
