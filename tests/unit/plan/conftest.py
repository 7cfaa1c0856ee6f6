"""Puts this folder on the path: `from plan_cases import request_of, columns_with`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
