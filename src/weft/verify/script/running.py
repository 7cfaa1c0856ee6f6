"""Runs a script as `__main__`, and turns what ends it into one error with a line of the script."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from weft.core.errors import InputError, RankError, WeftError


def run_script(script: str, arguments: list[str]) -> Exception | None:
    """The script as `__main__`; the exception that ended it, None after a good end."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code in (None, 0):
            return None
        return InputError(f"{Path(script).name} ended with {end.code!r}", hint="its output is above")
    except WeftError as error:
        return error
    except Exception as error:
        return _located(error, script)
    return None


def _located(error: Exception, script: str) -> RankError:
    """The exception with the last line of the script in its stack."""
    frame, line = error.__traceback__, 0
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == script:
            line = frame.tb_lineno
        frame = frame.tb_next
    first = next(iter(str(error).strip().splitlines()), "")
    found = RankError(
        f"{type(error).__name__}: {first} ({Path(script).name}, line {line})",
        hint="its output is above; the script must run under torchrun with this many ranks",
    )
    found.__cause__ = error
    return found
