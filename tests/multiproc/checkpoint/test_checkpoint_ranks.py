"""Checkpoints of several ranks: other world sizes, agreement on what is good, failures that reach all, kill -9."""

from __future__ import annotations

import errno
import io
import os
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import RankJob, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from weft.checkpoint import CheckpointStore, peek_newest, read_manifest, read_tensors
from weft.checkpoint import writer as writer_module
from weft.core.errors import CheckpointError, SaveError

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)


def full_state(step: int) -> dict[str, Tensor]:
    """The global values: rows that divide by no world size, fewer rows than ranks, every dtype, a 0-dim tensor."""
    generator = torch.Generator().manual_seed(step)
    state = {f"rows.{dtype}": torch.randint(0, 100, (7, 3), generator=generator).to(dtype) for dtype in DTYPES}
    state["few"] = torch.randn(2, 5, generator=generator)
    state["columns"] = torch.randn(3, 9, generator=generator)
    state["replicated"] = torch.randn(6, generator=generator)
    state["plain"] = torch.randn(4, 2, generator=generator)
    state["scalar"] = torch.tensor(float(step))
    return state


def sharded_state(world_size: int, step: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (world_size,))
    placements = {"columns": Shard(1), "replicated": Replicate()}
    return {
        key: tensor if key in ("plain", "scalar") else distribute_tensor(tensor, mesh, [placements.get(key, Shard(0))])
        for key, tensor in full_state(step).items()
    }


def new_store(root: str, **options: Any) -> CheckpointStore:
    return CheckpointStore(Path(root), process_group=dist.new_group(backend="gloo"), **options)


def assert_state(state: dict[str, Tensor], step: int) -> None:
    for key, expected in full_state(step).items():
        tensor = state[key]
        actual = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected), key


def save_steps(rank: int, world_size: int, root: str, steps: list[int]) -> list[int]:
    """Asynchronous saves whose tensors are spoilt as soon as `save` has returned."""
    store = new_store(root)
    for step in steps:
        state = sharded_state(world_size, step)
        store.save(state, {"step": step}, step=step)
        for tensor in state.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    committed = store.wait()
    assert committed is not None
    return store.list()


def load_newest(rank: int, world_size: int, root: str, expected_step: int) -> tuple[int, list[tuple[str, str]]]:
    state = sharded_state(world_size, 999)
    loaded = new_store(root).load(state)
    assert loaded.meta == {"step": loaded.step}
    assert loaded.step == expected_step
    assert_state(state, expected_step)
    return loaded.step, loaded.rejected


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two") / "checkpoints"
    assert run_ranks(save_steps, 2, str(root), [1, 2, 3]) == [[3, 2], [3, 2]]
    return root


class TestReshard:
    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_saved_on_two_loaded_on(self, saved_by_two: Path, world_size: int) -> None:
        assert run_ranks(load_newest, world_size, str(saved_by_two), 3) == [(3, [])] * world_size

    def test_saved_on_four_loaded_on_two(self, tmp_path: Path) -> None:
        run_ranks(save_steps, 4, str(tmp_path), [5])
        run_ranks(load_newest, 2, str(tmp_path), 5)

    def test_loaded_without_any_group(self, saved_by_two: Path) -> None:
        state = {key: torch.zeros_like(tensor) for key, tensor in full_state(0).items()}
        assert CheckpointStore(saved_by_two).load(state).step == 3
        assert_state(state, 3)
        assert_state(dict(read_tensors(saved_by_two / "step-00000003")), 3)

    def test_replicated_data_is_written_once(self, saved_by_two: Path) -> None:
        manifest = read_manifest(saved_by_two / "step-00000003")
        assert manifest.world_size == 2
        assert sorted(manifest.files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "index.json"]
        index = (saved_by_two / "step-00000003" / "index.json").read_text()
        assert index.count("plain") == 1


class TestAgreement:
    @pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata", "index.json", "manifest.json"])
    def test_damage_in_any_file_moves_all_ranks_to_the_one_before(
        self, saved_by_two: Path, tmp_path: Path, file: str
    ) -> None:
        root = Path(shutil.copytree(saved_by_two, tmp_path / "checkpoints"))
        damaged = root / "step-00000003" / file
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 4
        damaged.write_bytes(data)
        [first, second] = run_ranks(load_newest, 2, str(root), 2)
        assert first == second
        assert first[1][0][0] == "step-00000003"
        assert file in first[1][0][1]

    def test_a_rank_that_sees_another_folder_cannot_condemn_a_checkpoint(
        self, saved_by_two: Path, tmp_path: Path
    ) -> None:
        root = shutil.copytree(saved_by_two, tmp_path / "checkpoints")
        messages = run_ranks(load_from_separate_folders, 2, [str(root), str(tmp_path / "elsewhere")])
        assert all("is the folder the same" in message for message in messages)
        assert peek_newest(Path(root)).step == 3  # type: ignore[union-attr]

    def test_keys_may_be_spread_over_ranks(self, tmp_path: Path) -> None:
        """Pipeline stages: each rank holds its own keys, saves and loads only those."""
        assert run_ranks(save_and_load_stages, 2, str(tmp_path)) == [None, None]

    def test_mismatch_is_the_same_error_on_all_ranks(self, saved_by_two: Path) -> None:
        messages = run_ranks(load_with_mismatch_on_rank_one, 2, str(saved_by_two))
        assert messages[0] == messages[1]
        assert "'few' has shape [2, 5] in the checkpoint and [5, 2]" in messages[0]


def load_from_separate_folders(rank: int, world_size: int, roots: list[str]) -> str:
    with pytest.raises(CheckpointError) as caught:
        new_store(roots[rank]).load(sharded_state(world_size, 0))
    return caught.value.message


def save_and_load_stages(rank: int, world_size: int, root: str) -> None:
    store = new_store(root)
    store.save({f"stage{rank}": torch.full((3,), rank + 1.0), "both": torch.ones(1)}, {}, step=1, asynchronous=False)
    state = {f"stage{rank}": torch.zeros(3), "both": torch.zeros(1)}
    store.load(state)
    assert torch.equal(state[f"stage{rank}"], torch.full((3,), rank + 1.0))
    with pytest.raises(CheckpointError, match="'stage1' is in the checkpoint and not in the model"):
        store.load({"stage0": torch.zeros(3), "both": torch.zeros(1)})


def load_with_mismatch_on_rank_one(rank: int, world_size: int, root: str) -> str:
    state = sharded_state(world_size, 0)
    if rank == 1:
        state["few"] = torch.zeros(5, 2)
    with pytest.raises(CheckpointError) as caught:
        new_store(root).load(state)
    return caught.value.message


class TestFailures:
    def test_full_disk_on_one_rank_reaches_all(self, tmp_path: Path) -> None:
        messages = run_ranks(save_with_full_disk_on_rank_one, 2, str(tmp_path))
        assert messages[0] == messages[1]
        assert messages[0].startswith(f"The checkpoint of step 2 was not saved: No space left on device: {tmp_path}, ")
        assert re.fullmatch(r".*, [\d.]+ \w+ needed, [\d.]+ \w+ free \(rank 1\)\.", messages[0])
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]

    def test_staging_failure_on_one_rank_reaches_all(self, tmp_path: Path) -> None:
        messages = run_ranks(save_with_no_memory_on_rank_one, 2, str(tmp_path))
        assert messages == ["The checkpoint of step 1 was not saved: MemoryError: none left (rank 1)."] * 2


def save_with_full_disk_on_rank_one(rank: int, world_size: int, root: str) -> str:
    store = new_store(root, keep=9)
    store.save(sharded_state(world_size, 1), {}, step=1, asynchronous=False)
    original = io.FileIO

    class Full(original):  # type: ignore[misc, valid-type]
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        writer_module.io.FileIO = Full  # type: ignore[misc]
    store.save(sharded_state(world_size, 2), {}, step=2)
    with pytest.raises(SaveError) as caught:
        store.wait()
    writer_module.io.FileIO = original  # type: ignore[misc]
    store.save(sharded_state(world_size, 3), {}, step=3, asynchronous=False)
    return caught.value.message


def save_with_no_memory_on_rank_one(rank: int, world_size: int, root: str) -> str:
    store = new_store(root)
    if rank == 1:
        store._buffers.copy = _no_memory  # type: ignore[method-assign, assignment]
    store.save(sharded_state(world_size, 1), {}, step=1)
    with pytest.raises(SaveError) as caught:
        store.wait()
    return caught.value.message


def _no_memory(*_: object) -> None:
    raise MemoryError("none left")


def save_for_ever(rank: int, world_size: int, root: str) -> None:
    """Continue from the newest checkpoint and save every step until killed."""
    store = new_store(root)
    first = 1
    if store.newest_step() is not None:
        state = sharded_state(world_size, 999)
        first = store.load(state).step + 1
        assert_state(state, first - 1)
    dist.barrier()
    for step in range(first, 100_000):
        store.save(sharded_state(world_size, step), {"step": step}, step=step)
        store.poll()


def test_kill_at_any_moment_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    """kill -9 of one rank or of all, in the middle of saves, six times over the same folder."""
    root = tmp_path / "checkpoints"
    chance = random.Random(7)
    reached = 0
    for round_number in range(6):
        with RankJob(save_for_ever, 2, str(root)) as job:
            _wait_until_step(root, reached + 2, job)
            time.sleep(chance.uniform(0, 0.15))
            job.kill(*([round_number % 2] if round_number < 4 else []))
        newest = CheckpointStore(root).list()[0]
        assert newest >= reached + 2
        state = {key: torch.zeros_like(tensor) for key, tensor in full_state(0).items()}
        loaded = CheckpointStore(root).load(state)
        assert (loaded.step, loaded.rejected) == (newest, [])
        assert_state(state, newest)
        reached = newest
    assert not [entry.name for entry in root.iterdir() if entry.name.startswith(".bad-")]


def _wait_until_step(root: Path, step: int, job: RankJob) -> None:
    deadline = time.monotonic() + 60
    while (peek_newest_step(root) or 0) < step:
        assert all(process.is_alive() for process in job.processes), "a rank ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def peek_newest_step(root: Path) -> int | None:
    return CheckpointStore(root).newest_step()


def test_death_at_each_boundary_of_a_save(tmp_path: Path) -> None:
    """The process ends, without any clean-up, just before its n-th call that changes the disk."""
    pristine = tmp_path / "pristine"
    CheckpointStore(pristine).save(full_state(1), {"step": 1}, step=1, asynchronous=False)
    [num_calls] = run_ranks(save_until_boundary, 1, str(shutil.copytree(pristine, tmp_path / "whole")), 10**9)
    newest = []
    # Every call of the commit and the retention; of the many writes of tensor data a few.
    for boundary in [*range(0, num_calls - 18, num_calls // 5), *range(num_calls - 18, num_calls)]:
        root = Path(shutil.copytree(pristine, tmp_path / "again"))
        with RankJob(save_until_boundary, 1, str(root), boundary) as job:
            job.processes[0].join(30)
            assert job.processes[0].exitcode == 9
        newest.append(_require_all_good(root))
        shutil.rmtree(root)
    assert newest == sorted(newest)
    assert {1, 2} == set(newest)


def _require_all_good(root: Path) -> int:
    """Every committed checkpoint has exact values, and the next save leaves no trace of the dead one."""
    steps = CheckpointStore(root).list()
    for step in steps:
        state = {key: torch.zeros_like(tensor) for key, tensor in full_state(0).items()}
        CheckpointStore(root).load(state, step=step)
        assert_state(state, step)
    CheckpointStore(root).save(full_state(3), {}, step=3, asynchronous=False)
    assert not [entry.name for entry in root.iterdir() if entry.name.startswith(".")]
    return steps[0]


def save_until_boundary(rank: int, world_size: int, root: str, boundary: int) -> int:
    calls = 0

    def count() -> None:
        nonlocal calls
        if calls == boundary:
            os._exit(9)
        calls += 1

    def counted(function: Any) -> Any:
        return lambda *args, **kwargs: (count(), function(*args, **kwargs))[1]

    class CountedFile(io.FileIO):
        def write(self, data: Any) -> int:
            count()
            return super().write(data)

    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    writer_module.io.FileIO = CountedFile  # type: ignore[misc]
    CheckpointStore(Path(root), keep=1).save(full_state(2), {"step": 2}, step=2, asynchronous=False)
    return calls


def scales() -> Tensor:
    return torch.arange(4 * 6 * 2, dtype=torch.float32).view(4, 6, 2)


def load_older_scales(rank: int, world_size: int, root: str) -> list[bool]:
    """8-bit moments of stacked experts, stored as [experts, blocks] by an earlier version."""
    key, mesh = "optim.experts.exp_avg.scales", init_device_mesh("cpu", (world_size,))
    with_group = new_store(root)
    with_group.save({key: distribute_tensor(scales().flatten(1), mesh, [Shard(0)])}, step=1, meta={})
    loaded = []
    for dim in (0, 1):
        wanted = distribute_tensor(torch.zeros(4, 6, 2), mesh, [Shard(dim)])
        with_group.load({key: wanted})
        loaded.append(torch.equal(wanted.full_tensor(), scales()))
    alone = torch.zeros(4, 6, 2)
    with_group.load({key: alone})
    return [*loaded, torch.equal(alone, scales())]


def test_scales_of_older_checkpoints_load(tmp_path: Path) -> None:
    assert run_ranks(load_older_scales, 2, str(tmp_path)) == [[True] * 3] * 2
