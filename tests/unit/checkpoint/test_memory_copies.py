"""Copies in host memory: a torn or altered one is never used, the newest common step is, neighbours are elsewhere."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from weft.checkpoint import memory_copies
from weft.checkpoint.exchange import Exchange
from weft.checkpoint.memory_copies import MemoryCopies, Neighbours
from weft.checkpoint.memory_file import PAGE_BYTES, MemoryFile
from weft.launch.memory_files import MemoryFiles
from weft.train.memory import neighbours_of


@pytest.fixture
def paths() -> Iterator[list[Path]]:
    owner = MemoryFiles(num_ranks=1)
    yield [Path(path) for path in owner.variables(0)["WEFT_MEMORY_FILES"].split(os.pathsep)]
    owner.close()


def state(value: float) -> dict[str, Tensor]:
    return {
        "model.w": torch.full((7, 5), float(value)),
        "optim.w.step": torch.tensor(float(value)),
        "codes": torch.full((3,), int(value), dtype=torch.uint8),
        "half": torch.full((2, 2), value, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
    }


def opened(paths: list[Path], *, layout: str = "a") -> MemoryCopies:
    """As the process of a new generation opens them."""
    return MemoryCopies([MemoryFile(path) for path in paths[:2]], Exchange(None), layout=layout, neighbours=None)


def taken(paths: list[Path], *steps: int) -> MemoryCopies:
    copies = opened(paths)
    for step in steps:
        copies.take(state(step), {"samples": 10 * step}, step=step)
    return copies


def restored(paths: list[Path], *, layout: str = "a", not_before: int = 0) -> tuple[int | None, list[str]]:
    """The step that a new process continues from, after a check of its values; and the notes."""
    copies, live = opened(paths, layout=layout), state(0)
    found = copies.restore(lambda: live, not_before=not_before)
    if found is not None:
        assert found.meta == {"samples": 10 * found.step}
        for key, value in state(found.step).items():
            assert torch.equal(live[key], value)
    return (found.step if found is not None else None), copies.notes


def test_the_newest_copy_is_loaded_by_another_process_of_the_same_memory(paths: list[Path]) -> None:
    assert restored(paths) == (None, [])
    taken(paths, 1, 2, 3)
    assert restored(paths) == (3, [])


@pytest.mark.parametrize("moment", ["cleared", "copied", "record"])
def test_a_kill_at_any_moment_of_a_copy_leaves_the_copy_before(
    moment: str, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = taken(paths, 1, 2)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    place: tuple[object, str] = {
        "cleared": (memory_copies.StateTable, "views"),
        "copied": (MemoryFile, "sum_of"),
        "record": (os, "pwrite"),
    }[moment]  # type: ignore[assignment]
    if moment == "record":
        write = os.pwrite

        def half(file: int, data: bytes, begin: int) -> int:
            if begin > 0:
                write(file, data[: len(data) // 2], begin)
                raise KeyboardInterrupt
            return write(file, data, begin)

        monkeypatch.setattr(os, "pwrite", half)
    else:
        monkeypatch.setattr(*place, die)
    with pytest.raises(KeyboardInterrupt):
        copies.take(state(3), {}, step=3)
    monkeypatch.undo()
    assert restored(paths) == (2, [])


def test_an_altered_byte_is_found_and_the_copy_before_is_used(paths: list[Path]) -> None:
    taken(paths, 1, 2)
    with paths[1].open("r+b") as file:
        file.seek(PAGE_BYTES + 11)
        file.write(b"\x07")
    assert restored(paths) == (1, ["copies in memory of step 2 are not used: rank 0: its checksum differs"])


def test_after_a_restart_copies_alternate_again_and_later_ones_are_forgotten(paths: list[Path]) -> None:
    taken(paths, 1, 2)
    copies, live = opened(paths), state(0)
    assert copies.restore(lambda: live, not_before=0) is not None
    assert [MemoryFile(path).read() is None for path in paths[:2]] == [True, False]
    copies.take(state(3), {"samples": 30}, step=3)
    assert restored(paths) == (3, [])


def test_a_newer_checkpoint_on_disk_and_another_layout_win(paths: list[Path]) -> None:
    taken(paths, 1, 2)
    assert restored(paths, not_before=2) == (2, [])
    assert restored(paths, not_before=3) == (None, [])
    taken(paths, 1, 2)
    assert restored(paths, layout="b") == (None, [])


def test_another_model_of_the_same_layout_is_refused(paths: list[Path]) -> None:
    taken(paths, 1)
    copies = opened(paths)
    assert copies.restore(lambda: {"model.w": torch.zeros(2)}, not_before=0) is None
    assert copies.notes == ["copies in memory of step 1 are not used: rank 0: they have other tensors than the model"]


def test_copies_hold_no_name_and_end_with_their_owner() -> None:
    owner = MemoryFiles(num_ranks=2)
    paths = [Path(path) for path in owner.variables(1)["WEFT_MEMORY_FILES"].split(os.pathsep)]
    assert len(paths) == 4
    assert all("memfd:weft-copy-1" in os.readlink(path) for path in paths)
    owner.close()
    assert not any(path.exists() for path in paths)


def test_a_neighbour_is_the_same_place_of_the_next_host() -> None:
    find: Callable[..., object] = neighbours_of
    assert find(0, ["a", "a"]) == (None, "")
    assert find(1, ["a", "a", "b", "b", "c", "c"]) == (Neighbours(keeper=3, guest=5), "")
    assert find(0, ["a", "b"]) == (Neighbours(keeper=1, guest=1), "")
    none, note = neighbours_of(0, ["a", "a", "b"])
    assert none is None
    assert "different numbers of ranks" in note
