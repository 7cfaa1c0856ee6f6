"""A launcher in a process of its own, for the tests that send it signals. Usage: launcher_script.py MODE FOLDER."""

import sys
from pathlib import Path

from weft.core.errors import WeftError
from weft.launch.local import launch

mode, folder = sys.argv[1], Path(sys.argv[2])
command = [sys.executable, str(Path(__file__).with_name("rank_script.py")), mode, str(folder)]
try:
    launch(command, num_ranks=2, scratch=folder / "ranks", max_restarts=2)
except WeftError as error:
    print(error.message)
    sys.exit(error.exit_code)
