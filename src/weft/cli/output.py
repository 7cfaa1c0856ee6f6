"""Files that verbs write at the user's request."""

from __future__ import annotations

import sys
from pathlib import Path

from weft.core.errors import InputError


def write_text(path: Path, content: str) -> None:
    """Write the file and report its path on stderr; InputError where it cannot be written."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}", hint="choose another --out") from None
    print(f"wrote {path}", file=sys.stderr)
