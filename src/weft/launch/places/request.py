"""`LaunchRequest`: what is launched, on how many nodes and ranks. A frozen value that every place turns into its text.

    ranks = nodes x ranks_per_node

`arguments` are the verb's own, without those that a place decides: number of ranks, run folder, restarts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weft.launch.places.settings import LaunchSettings

PORT = 29_500  # of the ranks' store, where a place has an address space of its own


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    verb: tuple[str, ...]  # ("train",), ("verify",), ("server", "train")
    arguments: tuple[str, ...]
    name: str
    nodes: int
    ranks_per_node: int
    on_gpus: bool
    folder: Path  # the working folder of all ranks
    out: str | None = None
    max_restarts: int = 0
    settings: LaunchSettings = field(default_factory=LaunchSettings)
    variants: tuple[tuple[str, ...], ...] = ()  # of a sweep: further arguments of each run
    documents: dict[str, Path] = field(default_factory=dict)  # argument -> file, for places that share no disk

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def has_agents(self) -> bool:
        """Whether nodes start ranks of one job; `verify` and `server` start their own processes on one node."""
        return self.verb == ("train",)


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    name: str
    text: str


def agent_command(request: LaunchRequest, *, python: str) -> list[str]:
    """The start of the command of a node: the agent that starts the ranks of that node."""
    return [python, "-m", "weft.launch.node", "--max-restarts", str(request.max_restarts)]


def verb_words(request: LaunchRequest) -> list[str]:
    """The verb and its arguments, without the run folder; with their number for a verb that starts its own ranks."""
    own = ["--nproc", str(request.num_ranks)] if request.verb == ("verify",) else []
    return [*request.verb, *request.arguments, *own]


def safe_name(text: str) -> str:
    """`text` as a name that every place takes: lower-case letters, digits and '-'."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"weft-{name}".rstrip("-")


def shell(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)
