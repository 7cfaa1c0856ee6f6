"""States in files on one rank: the bits of the run without offload, checkpoints both ways, steps that survive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded import digests, trained
from samples import by_default
from state_files import close_files, committed_steps, file_engine, trained_in_files
from tiny import build_engine, train_steps

import weft.engine.updates as engine_updates
from weft.checkpoint.staging import StagedPlanner
from weft.core.errors import BadValueError, FolderBusyError, NotBuiltError, StateFileError
from weft.core.state_folder import ANY_STEP
from weft.engine.offload.chunk_kernel import ChunkKernel
from weft.engine.offload.direct_file import DirectFile
from weft.engine.offload.file_store import FileStore
from weft.engine.optim.clip import clip_factor
from weft.engine.optim.optimizers import OptimizerPolicy

UPDATES = ("device", "host")
BF16 = {"precision": {"preset": "bf16"}}
LOW: dict[str, Any] = {"precision": {"preset": "bf16", "optimizer_state": "bfloat16"}}
POLICIES: dict[str, tuple[dict[str, Any], OptimizerPolicy]] = {
    "adamw": ({"pipeline": {"microbatches": 4}, **BF16}, OptimizerPolicy()),
    "adam": ({"data_parallel": {"zero": 2}, "pipeline": {"microbatches": 2}}, OptimizerPolicy(kind="adam")),
    "sgd with momentum": ({}, OptimizerPolicy(kind="sgd", learning_rate=1e-2)),
    "sgd": ({}, OptimizerPolicy(kind="sgd", learning_rate=1e-2, momentum=0.0)),
    "bfloat16 moments": ({**LOW, "data_parallel": {"zero": 3}}, OptimizerPolicy()),
    "float16": ({"precision": {"preset": "fp16"}}, OptimizerPolicy()),
}
DEFAULT = ("adamw", "bfloat16 moments")


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", by_default(DEFAULT, POLICIES, extended=["float16"]))
def test_every_bit_is_that_of_the_run_without_offload(name: str, update: str, tmp_path: Path) -> None:
    plan, policy = POLICIES[name]
    expected = trained("qwen3-tied", plan, "", optimizer=policy)
    assert trained_in_files("qwen3-tied", plan, tmp_path / "states", update, optimizer=policy) == expected
    assert not (tmp_path / "states").exists()  # files that no other process may trust are removed


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("clip_norm", [1e-3, pytest.param(0.0, marks=pytest.mark.extended), 1e9])
def test_clipping_has_the_same_bits(update: str, clip_norm: float, tmp_path: Path) -> None:
    expected = trained("qwen3-tied", {}, "", clip_norm=clip_norm, steps=3)
    found = trained_in_files("qwen3-tied", {}, tmp_path, update, clip_norm=clip_norm, steps=3, durable="step")
    assert found == expected


@pytest.mark.parametrize("update", UPDATES)
def test_parameters_without_gradients_keep_their_states_in_both_files(update: str, tmp_path: Path) -> None:
    engines = [build_engine("qwen3-tied", {}), file_engine("qwen3-tied", {}, tmp_path, update, durable="step")]
    found = []
    for engine in engines:
        losses = train_steps(engine, 1)
        for name, parameter in engine.model.named_parameters():
            if ".layers.1." in name:
                parameter.requires_grad_(False)
                parameter.grad = None
        found.append((losses + train_steps(engine, 3, first=1), digests(engine)))
    assert found[0] == found[1]
    close_files(engines[1])


def test_a_skipped_step_leaves_the_file_untouched_and_is_committed(tmp_path: Path) -> None:
    plan = {"precision": {"preset": "fp16"}}
    engine = file_engine("qwen3-tied", plan, tmp_path, "device", durable="step")
    train_steps(engine, 2)
    engine.loss_scale.value = 2.0**120
    state = digests(engine)
    before = [(path.name, path.read_bytes()) for path in sorted(tmp_path.glob("*.states"))]
    train_steps(engine, 1, first=2)
    scale = engine.loss_scale.value
    close_files(engine)
    assert [(path.name, path.read_bytes()) for path in sorted(tmp_path.glob("*.states"))] == before
    assert committed_steps(tmp_path) == [2, 3]
    again = file_engine("qwen3-tied", plan, tmp_path, "device", durable="step", resume=ANY_STEP, seed=5)
    assert (again.steps_done, again.loss_scale.value, digests(again)) == (3, scale, state)
    close_files(again)


@pytest.mark.parametrize(("first", "second"), [("device", ""), ("", "host"), ("host", "device")])
def test_a_checkpoint_loads_with_and_without_files(first: str, second: str, tmp_path: Path) -> None:
    def engine(update: str) -> Any:
        if not update:
            return build_engine("qwen3-tied", plan)
        return file_engine("qwen3-tied", plan, tmp_path / f"states-{update}", update)

    plan = {"data_parallel": {"zero": 3}, **BF16}
    writer, reader = engine(first), engine(second)
    train_steps(writer, 2)
    writer.save(tmp_path)
    assert reader.load(tmp_path) == 2
    assert digests(reader) == digests(writer)
    assert train_steps(reader, 2, first=2) == train_steps(writer, 2, first=2)
    assert digests(reader) == digests(writer)
    for one in (one for one in (writer, reader) if one.offload is not None):
        close_files(one)


@pytest.mark.parametrize("update", UPDATES)
def test_a_resume_continues_from_the_newest_committed_step(update: str, tmp_path: Path) -> None:
    plan = {**BF16, "data_parallel": {"zero": 2}}
    expected = trained("qwen3-tied", plan, "", steps=5)
    engine = file_engine("qwen3-tied", plan, tmp_path, update, durable="step")
    losses = train_steps(engine, 3)
    close_files(engine)
    again = file_engine("qwen3-tied", plan, tmp_path, update, durable="step", resume=ANY_STEP, seed=9)
    assert again.steps_done == 3
    assert (losses + train_steps(again, 2, first=3), digests(again)) == expected
    close_files(again)


def test_files_are_not_used_by_a_new_run_nor_if_a_checkpoint_is_newer_nor_on_another_layout(tmp_path: Path) -> None:
    engine = file_engine("qwen3-tied", {}, tmp_path, "device", durable="step")
    train_steps(engine, 2)
    close_files(engine)
    other = file_engine(
        "qwen3-tied", {"data_parallel": {"zero": 3}}, tmp_path, "device", durable="step", resume=ANY_STEP
    )
    assert other.steps_done == 0
    assert other.offload is not None
    assert "another layout" in other.offload.memory.notes[0]
    close_files(other)
    engine = file_engine("qwen3-tied", {}, tmp_path, "device", durable="step")
    train_steps(engine, 2)
    close_files(engine)
    for resume in (2, None):  # the second finds that the first has forgotten the files
        later = file_engine("qwen3-tied", {}, tmp_path, "device", durable="step", resume=resume)
        assert later.steps_done == 0
        assert committed_steps(tmp_path) == []
        close_files(later)


def test_memory_of_a_checkpoint_is_that_of_the_file_and_both_ways_coherent(tmp_path: Path) -> None:
    """What a transfer past the page cache has written is what mapped memory shows, and the other way round."""
    engine = file_engine("qwen3-tied", {}, tmp_path, "device")
    [file] = tmp_path.glob("*.states")
    for step in range(3):
        train_steps(engine, 1, first=step)
        shown = digests(engine)
        for state in engine.optimizer.state.values():  # write through the mapping, as loading does
            state["exp_avg"].add_(0.5)
        changed = digests_of(engine)
        engine.offload.memory.after_load()  # type: ignore[union-attr]
        assert changed == digests(engine) != shown
        assert file.stat().st_size % 4096 == 0
    close_files(engine)


def test_a_save_frees_the_memory_of_each_state_before_it_reads_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed, resolved = [], []
    release, resolve = DirectFile.release, StagedPlanner.lookup_object

    def look(self: StagedPlanner, index: Any) -> Any:
        found = resolve(self, index)
        if index.fqn in self._releases:
            resolved.append(found.nbytes)
            assert found.untyped_storage().nbytes() == found.nbytes  # else DCP would copy it
            assert len(resolved) - len(freed) <= 1
        return found

    def free(self: DirectFile, mapped: Any, offset: int, nbytes: int) -> None:
        release(self, mapped, offset, nbytes)
        freed.append(nbytes)

    monkeypatch.setattr(StagedPlanner, "lookup_object", look)
    monkeypatch.setattr(DirectFile, "release", free)
    engine = file_engine("qwen3-tied", BF16, tmp_path / "states", "device")
    train_steps(engine, 1)
    engine.save(tmp_path)
    assert len(resolved) == 3 * len(engine.parameters)  # masters and two moments
    close_files(engine)


def digests_of(engine: Any) -> dict[str, str]:
    """As `digests`, of what the mapping shows now: the file is not checked."""
    store = engine.offload.memory.file_store
    each, store.each = store.each, lambda: None
    try:
        return digests(engine)
    finally:
        store.each = each


# --- planted bugs ----------------------------------------------------------------------------------------------------


def _twice(original: Callable[..., None]) -> Callable[..., None]:
    calls = 0

    def update(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        original(*args, **kwargs)
        calls += 1
        if calls == 2:
            original(*args, **kwargs)

    return update


@pytest.mark.parametrize("update", UPDATES)
def test_a_chunk_that_is_updated_twice_is_caught(update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained("qwen3-tied", {}, "", steps=2)
    monkeypatch.setattr(ChunkKernel, "update", _twice(ChunkKernel.update))
    assert trained_in_files("qwen3-tied", {}, tmp_path, update, steps=2) != expected


def test_a_stale_chunk_that_is_written_back_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FileStore.put

    def stale(self: FileStore, chunk: Any, stored: Any) -> None:
        if chunk.begin == 0:  # the slot as it was read
            file, source = self.files[0], self.layout.spans[chunk][0]
            file.read(self._memory[self._fetched[chunk]][: source.nbytes], source.offset)
        original(self, chunk, stored)

    expected = trained("qwen3-tied", {}, "", steps=2)
    monkeypatch.setattr(FileStore, "put", stale)
    assert trained_in_files("qwen3-tied", {}, tmp_path, "host", steps=2) != expected


def test_a_file_of_another_step_is_caught(tmp_path: Path) -> None:
    engine = file_engine("qwen3-tied", {}, tmp_path, "device")
    [path] = tmp_path.glob("*.states")
    train_steps(engine, 1)
    engine.offload.wait()  # type: ignore[union-attr]
    old = path.read_bytes()
    train_steps(engine, 1, first=1)
    engine.offload.memory.begin_update()  # type: ignore[union-attr]
    path.write_bytes(old)
    with pytest.raises(StateFileError, match=r"rank-0-a\.states was changed.*checksum"):
        train_steps(engine, 1, first=2)
    with pytest.raises(StateFileError, match="was changed"):  # nor does it go on
        train_steps(engine, 1, first=3)


def test_a_clip_factor_of_the_step_before_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained("qwen3-tied", {}, "", clip_norm=0.1)
    factors = [torch.ones(())]

    def late(norm: torch.Tensor, bound: float) -> torch.Tensor:
        factors.append(clip_factor(norm, bound))
        return factors[-2]

    monkeypatch.setattr(engine_updates, "clip_factor", late)
    assert trained_in_files("qwen3-tied", {}, tmp_path, "device", clip_norm=0.1) != expected


# --- refusals --------------------------------------------------------------------------------------------------------


def test_files_without_a_folder_and_files_of_another_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="has no folder") as caught:
        build_engine("llama", {"offload": {"optimizer": "nvme"}})
    assert "offload.folder" in caught.value.hint
    engine = file_engine("qwen3-tied", {}, tmp_path, "device")
    with pytest.raises(FolderBusyError, match="another run keeps its optimizer states in"):
        file_engine("qwen3-tied", {}, tmp_path, "device")
    close_files(engine)
    with pytest.raises(NotBuiltError, match=r"offload\.folder and offload\.durable without states in files"):
        build_engine("llama", {"offload": {"optimizer": "cpu", "durable": "step"}})
