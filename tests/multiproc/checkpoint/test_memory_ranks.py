"""Copies in memory of several ranks on two simulated hosts: which step, from where, when a host or two are gone."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from weft.checkpoint.exchange import Exchange
from weft.checkpoint.memory_copies import MemoryCopies
from weft.checkpoint.memory_file import MemoryFile
from weft.launch.memory_files import MemoryFiles
from weft.train.memory import neighbours_of

HOSTS = ["a", "a", "b", "b"]


def state(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3 + rank, 100), float(10 * step + rank))}


def opened(paths: list[Path]) -> MemoryCopies:
    neighbours, _ = neighbours_of(dist.get_rank(), HOSTS)
    files = [MemoryFile(path) for path in paths]
    return MemoryCopies(files, Exchange(dist.group.WORLD), layout="a", neighbours=neighbours)


def lose_hosts(rank: int, num_ranks: int) -> list[str]:
    """Per loss: the step that is found, how many copies came from another host."""
    found = []
    owner = MemoryFiles(num_ranks=1)
    paths = [Path(path) for path in owner.variables(0)["WEFT_MEMORY_FILES"].split(os.pathsep)]
    copies = opened(paths)
    for step in (1, 2):
        copies.take(state(rank, step), {"rank": rank}, step=step)
    # (lost hosts, ranks that began the copy of the next step)
    for lost, torn in (("", ()), ("", (1,)), ("b", ()), ("b", (0, 1)), ("ab", ())):
        if HOSTS[rank] in lost:
            owner = MemoryFiles(num_ranks=1)
            paths = [Path(path) for path in owner.variables(0)["WEFT_MEMORY_FILES"].split(os.pathsep)]
        if rank in torn:
            newest = max((MemoryFile(path) for path in paths[:2]), key=lambda file: getattr(file.read(), "step", 0))
            newest.clear()
        copies, live = opened(paths), state(rank, 0)
        loaded = copies.restore(lambda live=live: live, not_before=0)  # type: ignore[misc]
        if loaded is None:
            found.append("none")
            continue
        assert torch.equal(live["w"], state(rank, loaded.step)["w"])
        assert loaded.meta == {"rank": rank}
        found.append(f"{loaded.step}, {loaded.num_received} received")
        for step in (loaded.step + 1, loaded.step + 2):
            copies.take(state(rank, step), {"rank": rank}, step=step)
    return found


@pytest.mark.slow
def test_the_newest_step_that_every_rank_has_somewhere() -> None:
    answers = run_ranks(lose_hosts, 4)
    # Rank 1, in the middle of a copy, gets its state from the other host while that lives; else all go back a step.
    assert answers[0] == ["2, 0 received", "4, 1 received", "6, 2 received", "7, 2 received", "none"]
    assert all(answer == answers[0] for answer in answers)
