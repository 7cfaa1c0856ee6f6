"""Puts this folder on the path: `from meta_models import differences`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
