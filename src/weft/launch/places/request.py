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
_AGENT = ("-m", "torch.distributed.run")


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


def agent_command(request: LaunchRequest, *, python: str, rendezvous: Sequence[str]) -> list[str]:
    """The start of the command of a node: torch elastic's agent, which starts the ranks of that node."""
    sizes = ["--nnodes", str(request.nodes), "--nproc-per-node", str(request.ranks_per_node)]
    restarts = ["--max-restarts", str(request.max_restarts)]
    return [python, *_AGENT, *sizes, *restarts, *rendezvous]


def rank_command(request: LaunchRequest) -> list[str]:
    """The rest of it, without the run folder: a module of Python and its arguments."""
    own = [] if request.has_agents or request.verb == ("server", "train") else ["--nproc", str(request.num_ranks)]
    return ["-m", "weft", *request.verb, *request.arguments, *own]


def safe_name(text: str) -> str:
    """`text` as a name that every place takes: lower-case letters, digits and '-'."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "weft"


def shell(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)
