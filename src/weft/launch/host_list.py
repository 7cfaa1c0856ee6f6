"""A list of hosts and their ranks, as a word of the command line or a file. A pure function of text.

gpu1:8,gpu2:8,user@gpu3:4      a word: name:ranks, separated by commas
gpu1 8                         a file: one host per line, also `gpu1:8` or `gpu1 slots=8`; # starts a comment
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import BadValueError, ConfigFileError

# As ssh takes it, and never an option of ssh.
_NAME = re.compile(r"(?:[\w.][\w.-]*@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.%\w]+\])")
_ENTRY = re.compile(rf"(?P<name>{_NAME.pattern})(?:(?::|\s+(?:slots=)?)(?P<ranks>\d+))?")
_FILE_SUFFIXES = (".txt", ".list", ".hosts", ".toml", ".conf", ".cfg")  # of no host's name
_FORM = "name:ranks, as gpu1:8,gpu2:8; in a file one host per line"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host as ssh names it, and its number of ranks."""

    name: str
    num_ranks: int


def read_hosts(text: str, *, ranks_per_host: int | None = None) -> tuple[Host, ...]:
    """The hosts of a list, or of the file of that name."""
    if Path(text).is_file():
        try:
            lines = Path(text).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigFileError(
                f"the host file {text} cannot be read: {error}", hint=f"one host per line: {_FORM}"
            ) from None
        return parse_hosts(lines, source=text, ranks_per_host=ranks_per_host)
    if "/" in text or Path(text).suffix in _FILE_SUFFIXES:
        raise ConfigFileError(f"there is no host file {text}", hint=f"give its path, or a list: {_FORM}")
    return parse_hosts(text.split(","), source="the list of hosts", ranks_per_host=ranks_per_host)


def parse_hosts(lines: list[str], *, source: str, ranks_per_host: int | None = None) -> tuple[Host, ...]:
    """The hosts of the entries; `ranks_per_host` is for entries without a number."""
    hosts = [_parse(entry, source, ranks_per_host) for line in lines if (entry := line.partition("#")[0].strip())]
    if not hosts:
        raise BadValueError(f"{source} names no host", hint=f"write {_FORM}")
    name, count = Counter(host.name for host in hosts).most_common(1)[0]
    if count > 1:
        raise BadValueError(f"{source} names {name} {count} times", hint="one entry per host, with all of its ranks")
    return tuple(hosts)


def _parse(entry: str, source: str, ranks_per_host: int | None) -> Host:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise BadValueError(f"{source}: {entry!r} is not a host and its ranks", hint=f"write {_FORM}")
    ranks = int(match["ranks"]) if match["ranks"] else ranks_per_host
    if ranks is None:
        raise BadValueError(
            f"{source}: {entry} has no number of ranks", hint=f"write {entry}:8, or give --nproc for every host"
        )
    if ranks < 1:
        raise BadValueError(f"{source}: {entry} has {ranks} ranks, not at least 1", hint="leave the host out")
    return Host(name=match["name"], num_ranks=ranks)
