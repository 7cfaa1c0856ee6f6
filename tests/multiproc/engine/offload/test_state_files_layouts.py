"""States in files on several ranks: every bit of the layout without offload, checkpoints of uneven shards, restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from narrow import Narrow
from offloaded import digests, small_chunks, trained
from state_files import close_files, committed_steps, file_engine, filed, trained_in_files
from tiny import CPU, train_steps

from weft.core.plan import Plan
from weft.core.state_folder import ANY_STEP, StateFolder
from weft.engine.engine import Engine
from weft.engine.offload.commits import CommitLog
from weft.engine.optim.optimizers import OptimizerPolicy

BF16 = {"precision": {"preset": "bf16"}}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "DDP": (2, "qwen3-tied", {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 4}}),
    "ZeRO-3": (2, "qwen3-tied", {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, **BF16}),
    "tensor parallel": (2, "llama", {"mesh": {"tp": 2}, **BF16}),
    "pipeline": (2, "qwen3-four", {"mesh": {"pp": 2}, "pipeline": {"microbatches": 4, "schedule": "1f1b"}, **BF16}),
    "HSDP": (4, "qwen3-tied", {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 2}, **BF16}),
}
DEFAULT = "ZeRO-3"


def both(rank: int, world: int, names: tuple[str, ...], folder: str) -> dict[str, bool]:
    """Whether losses, norms and all bytes of this rank are equal, by layout and place of the update."""
    found = {}
    for name in names:
        _, family, plan = LAYOUTS[name]
        expected = trained(family, plan, "", steps=3)
        for update, durable in (("device", "step"), ("host", "checkpoint")):
            states = Path(folder) / f"{name}-{update}"
            result = trained_in_files(family, plan, states, update, steps=3, durable=durable)
            found[f"{name}, {update}"] = result == expected
    return found


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, (DEFAULT,)),
        pytest.param(2, ("DDP", "tensor parallel", "pipeline"), marks=pytest.mark.extended),
        pytest.param(4, ("HSDP",), marks=pytest.mark.extended),
    ],
)
def test_every_bit_is_that_of_the_layout_without_offload(world: int, names: tuple[str, ...], tmp_path: Path) -> None:
    for found in run_ranks(both, world, names, str(tmp_path), timeout_s=240.0):
        assert [name for name, is_equal in found.items() if not is_equal] == []
        assert len(found) == 2 * len(names)


def uneven(world: int, folder: Path | None, *, durable: str = "checkpoint", resume: int | None = None) -> Engine:
    torch.manual_seed(0)
    sharded = {"mesh": {"dp_shard": world}, "data_parallel": {"zero": 3}} if world > 1 else {}
    states = StateFolder(path=folder, after_step=resume) if folder is not None else None
    with small_chunks():
        plan = Plan.from_tables(filed(sharded, "device" if folder is not None else "", durable=durable))
        policy = OptimizerPolicy(learning_rate=1e-3)
        return Engine(Narrow(), plan, optimizer=policy, device=CPU, state_folder=states)


def save(rank: int, world: int, folder: str) -> bool:
    plain, engine = uneven(world, None), uneven(world, Path(folder) / "states")
    is_same = train_steps(engine, 3) == train_steps(plain, 3) and digests(engine) == digests(plain)
    engine.save(Path(folder) / "filed")
    plain.save(Path(folder) / "plain")
    close_files(engine)
    return is_same


def load(rank: int, world: int, folder: str) -> dict[str, bool]:
    plain, engine = uneven(world, None), uneven(world, Path(folder) / f"states-{world}")
    assert plain.load(Path(folder) / "filed") == engine.load(Path(folder) / "plain") == 3
    found = {"loaded": digests(plain) == digests(engine)}
    is_same = train_steps(plain, 2, first=3) == train_steps(engine, 2, first=3)
    found["trained"] = is_same and digests(plain) == digests(engine)
    close_files(engine)
    return found


@pytest.mark.extended
def test_uneven_and_empty_shards_save_on_one_layout_and_load_on_others(tmp_path: Path) -> None:
    assert all(run_ranks(save, 4, str(tmp_path)))
    for world in (1, 2):
        for found in run_ranks(load, world, str(tmp_path)):
            assert [name for name, is_equal in found.items() if not is_equal] == []


def restart(rank: int, world: int, folder: str) -> list[Any]:
    """Train; take the newest record of one rank away, as a kill between two commits does; resume twice."""
    states = Path(folder) / "states"
    whole, engine = uneven(world, None), uneven(world, states, durable="step")
    expected = train_steps(whole, 5), digests(whole)
    losses = train_steps(engine, 4)
    close_files(engine)
    found: list[Any] = []
    for damage in ("record", "file"):
        newest = max(committed_steps(states, rank=rank))
        if rank == 1:
            log = CommitLog(states, rank=rank)
            [number] = [one for one in range(2) if (record := log.read(one)) and record.steps[-1].step == newest]
            if damage == "record":
                log.remove(number)
            else:
                log.state_path(number).write_bytes(bytes(log.state_path(number).stat().st_size))
        torch.distributed.barrier()
        again = uneven(world, states, durable="step", resume=ANY_STEP)
        assert again.offload is not None
        begun = again.steps_done
        result = losses[:begun] + train_steps(again, 5 - begun, first=begun)
        found += [begun, bool(again.offload.memory.notes), (result, digests(again)) == expected]
        close_files(again)
    return found


def test_a_restart_begins_at_the_newest_step_that_all_ranks_have_whole(tmp_path: Path) -> None:
    for found in run_ranks(restart, 2, str(tmp_path)):
        assert found == [3, False, True, 4, True, True]


def other_layout(rank: int, world: int, folder: str) -> list[Any]:
    states = Path(folder) / "states"
    engine = file_engine("qwen3-tied", {"mesh": {"tp": 2}}, states, "host", durable="step")
    train_steps(engine, 2)
    close_files(engine)
    plan = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}}
    again = file_engine("qwen3-tied", plan, states, "host", durable="step", resume=ANY_STEP)
    assert again.offload is not None
    found = [again.steps_done, "another layout" in again.offload.memory.notes[0]]
    close_files(again)
    return found


@pytest.mark.extended
def test_files_of_another_layout_are_not_used(tmp_path: Path) -> None:
    for found in run_ranks(other_layout, 2, str(tmp_path)):
        assert found == [0, True]
