"""Puts the tests' own modules on the path: `from gloo_ranks import run_ranks`, `from tiny import FAMILIES`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "multiproc"))
sys.path.insert(0, str(Path(__file__).parent / "support"))
