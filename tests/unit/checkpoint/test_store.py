"""Saving and loading in one process: values, dtypes, order of events, failures, retention."""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.checkpoint import CheckpointStore, peek_newest, read_manifest, read_tensors
from weft.checkpoint import writer as writer_module
from weft.core.errors import CheckpointError, SaveError


def make_state(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.a.weight": torch.randn(5, 3, generator=generator),
        "model.b.weight": torch.randn(4, 4, generator=generator).to(torch.bfloat16),
        "model.mask": torch.randint(0, 2, (7,), generator=generator).to(torch.uint8),
        "optim.step": torch.tensor(float(seed)),
        "optim.count": torch.randint(0, 10**12, (3,), generator=generator),
        "empty": torch.empty(0, 3),
    }


def make_template() -> dict[str, Tensor]:
    return {key: torch.full_like(tensor, 99) for key, tensor in make_state().items()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype, key
        assert torch.equal(actual[key], tensor), key


def saved(root: Path, *steps: int, keep: int = 9) -> CheckpointStore:
    store = CheckpointStore(root, keep=keep)
    for step in steps:
        store.save(make_state(step), {"step": step}, step=step, asynchronous=False)
    return store


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_round_trip(tmp_path: Path, asynchronous: bool) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    meta = {"position": {"epoch": 1, "sample": 123}, "scale": 65536.0, "nothing": None, "best": float("inf")}
    store.save(make_state(7), meta, step=100, asynchronous=asynchronous)
    committed = store.wait()
    assert committed is not None
    assert (committed.step, committed.already_there) == (100, False)
    assert committed.path == tmp_path / "checkpoints" / "step-00000100"
    template = make_template()
    addresses = {key: tensor.data_ptr() for key, tensor in template.items()}
    loaded = CheckpointStore(tmp_path / "checkpoints").load(template)
    assert (loaded.step, loaded.meta, loaded.rejected, loaded.path) == (100, meta, [], committed.path)
    assert_equal(template, make_state(7))
    assert addresses == {key: tensor.data_ptr() for key, tensor in template.items()}


def test_manifest_says_what_is_there(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    committed = store.poll()
    manifest = read_manifest(tmp_path / "step-00000003")
    on_disk = {entry.name: entry.stat().st_size for entry in (tmp_path / "step-00000003").iterdir()}
    del on_disk["manifest.json"]
    assert {name: record.size_bytes for name, record in manifest.files.items()} == on_disk
    assert committed is not None
    assert committed.size_bytes == sum(on_disk.values())
    assert manifest.tensors["model.b.weight"].shape == (4, 4)
    assert manifest.tensors["model.b.weight"].dtype == "bfloat16"
    assert manifest.tensors["optim.step"].shape == ()
    assert (manifest.world_size, manifest.step, manifest.torch_version) == (1, 3, str(torch.__version__))
    assert str(tmp_path).encode() not in b"".join(p.read_bytes() for p in (tmp_path / "step-00000003").iterdir())


def test_state_may_change_as_soon_as_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()
    write = writer_module.CommittingWriter.write_data
    monkeypatch.setattr(writer_module.CommittingWriter, "write_data", lambda *args: hold.wait(20) and write(*args))
    store = CheckpointStore(tmp_path)
    state, meta = make_state(1), {"list": [1]}
    store.save(state, meta, step=1)
    for tensor in state.values():
        tensor.zero_()
    meta["list"].append(2)
    assert store.poll() is None
    assert store.newest_step() is None
    hold.set()
    assert store.wait() is not None
    template = make_template()
    assert store.load(template).meta == {"list": [1]}
    assert_equal(template, make_state(1))


def test_the_second_save_does_not_disturb_the_first(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    for step in (1, 2, 3):
        store.save(make_state(step), {}, step=step)
    assert store.wait().step == 3  # type: ignore[union-attr]
    assert store.poll() is None
    for step in (1, 2, 3):
        template = make_template()
        store.load(template, step=step)
        assert_equal(template, make_state(step))


def test_dcp_itself_opens_what_we_write(tmp_path: Path) -> None:
    """The format stays DCP's own, so that its tools work on it."""
    import torch.distributed.checkpoint as dcp

    saved(tmp_path, 5)
    template = make_template()
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(template, checkpoint_id=tmp_path / "step-00000005", no_dist=True)
    assert_equal(template, make_state(5))


def test_all_is_on_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut needs: every file synced, then the directory, then the rename, then the parent."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(handle: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def note_rename(source: Path, target: Path) -> None:
        events.append(f"-> {Path(target).name}")
        rename(source, target)

    saved(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    saved(tmp_path, 2)
    commit = events.index("-> step-00000002")
    files = {entry.name for entry in (tmp_path / "step-00000002").iterdir()}
    synced = [event for event in events[: commit - 1] if not event.startswith("-> ")]
    assert sorted(synced) == sorted(files - {".metadata"} | {".metadata.tmp"})
    assert events[commit - 1].startswith(".tmp-00000002-")
    assert events[commit + 1] == tmp_path.name


class TestFailedSaves:
    def test_full_disk_shows_at_the_next_poll(self, tmp_path: Path) -> None:
        """A real failing write: the kernel refuses to let a file grow beyond the limit."""
        store = saved(tmp_path, 1)
        store.poll()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
        try:
            store.save({**make_state(2), "big": torch.zeros(100_000)}, {}, step=2)
            with pytest.raises(SaveError, match="step 2 was not saved: File too large") as caught:
                store.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "untouched" in caught.value.hint
        assert names(tmp_path) == ["step-00000001"]
        assert store.poll() is None
        store.save(make_state(3), {}, step=3)
        assert store.wait().step == 3  # type: ignore[union-attr]

    @pytest.mark.parametrize("failing", ["manifest.json", "index.json", ".metadata.tmp", "__0_0.distcp"])
    def test_no_space_for_any_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
        store = saved(tmp_path, 1)
        original = writer_module.io.FileIO

        class Full(original):  # type: ignore[misc, valid-type]
            def write(self, data: Any) -> int:
                if str(self.name).endswith(failing):
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(data)

        monkeypatch.setattr(writer_module.io, "FileIO", Full)
        with pytest.raises(SaveError, match="No space left on device"):
            store.save(make_state(2), {}, step=2, asynchronous=False)
        assert names(tmp_path) == ["step-00000001"]

    def test_a_disk_that_fills_up_in_the_middle_of_a_tensor(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """torch.save, left in the middle, ends in an enforce of its own; the disk is what the user hears of."""
        store, room = saved(tmp_path, 1), [100_000]
        original = writer_module.io.FileIO

        class Filling(original):  # type: ignore[misc, valid-type]
            def write(self, data: Any) -> int:
                room[0] -= len(data)
                if room[0] < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(data)

        monkeypatch.setattr(writer_module.io, "FileIO", Filling)
        with pytest.raises(SaveError) as caught:
            store.save({**make_state(2), "big": torch.zeros(100_000)}, {}, step=2, asynchronous=False)
        assert "enforce" not in caught.value.message
        assert f"No space left on device: {tmp_path}, 390." in caught.value.message  # KiB, of 100,000 floats and a few
        assert " needed, " in caught.value.message
        assert caught.value.message.endswith(" free.")
        assert "again" not in caught.value.hint
        assert names(tmp_path) == ["step-00000001"]

    def test_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        store = CheckpointStore(tmp_path / "file" / "checkpoints")
        store.save(make_state(), {}, step=1)
        with pytest.raises(SaveError, match=r"Not a directory.*rank 0"):
            store.wait()

    def test_error_of_one_save_survives_the_start_of_the_next(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoints").write_text("in the way")
        store = CheckpointStore(tmp_path / "checkpoints")
        store.save(make_state(1), {}, step=1)
        store._join()
        (tmp_path / "checkpoints").unlink()
        store.save(make_state(2), {}, step=2)
        with pytest.raises(SaveError, match="step 1"):
            store.wait()
        assert store.wait().step == 2  # type: ignore[union-attr]

    def test_staging_failure_is_a_save_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = CheckpointStore(tmp_path)

        def no_memory(*_: object) -> None:
            raise MemoryError("no host memory")

        monkeypatch.setattr(store._buffers, "copy", no_memory)
        store.save(make_state(), {}, step=1)
        with pytest.raises(SaveError, match="no host memory"):
            store.wait()

    def test_what_does_not_read_back_is_not_committed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A disk that lies: the checkpoint is damaged between the commit and the read-back."""
        store = saved(tmp_path, 1, keep=1)
        commit = writer_module.commit

        def commit_and_damage(temporary: Path, final: Path) -> None:
            commit(temporary, final)
            (final / "__0_0.distcp").write_bytes(b"x" * (final / "__0_0.distcp").stat().st_size)

        monkeypatch.setattr(writer_module, "commit", commit_and_damage)
        with pytest.raises(SaveError, match=r"failed verification, __0_0.distcp was altered"):
            store.save(make_state(2), {}, step=2, asynchronous=False)
        assert store.list() == [1]

    @pytest.mark.parametrize("bad", [3, "text", [torch.zeros(1)]])
    def test_only_tensors(self, tmp_path: Path, bad: Any) -> None:
        with pytest.raises(TypeError, match="only plain tensors"):
            CheckpointStore(tmp_path).save({"x": bad}, {}, step=1)


class TestSameStepAgain:
    def test_good_one_is_left_alone(self, tmp_path: Path) -> None:
        store = saved(tmp_path, 4)
        store.poll()
        before = (tmp_path / "step-00000004" / "manifest.json").stat()
        store.save(make_state(5), {}, step=4)
        committed = store.wait()
        assert committed is not None
        assert committed.already_there
        assert (tmp_path / "step-00000004" / "manifest.json").stat().st_ino == before.st_ino
        template = make_template()
        store.load(template)
        assert_equal(template, make_state(4))

    def test_damaged_one_is_set_aside(self, tmp_path: Path) -> None:
        store = saved(tmp_path, 4)
        (tmp_path / "step-00000004" / "index.json").unlink()
        store.save(make_state(5), {}, step=4, asynchronous=False)
        template = make_template()
        store.load(template)
        assert_equal(template, make_state(5))
        assert [name.startswith(".bad-step-00000004-") for name in names(tmp_path)] == [True, False]


class TestRetention:
    def test_keeps_the_newest(self, tmp_path: Path) -> None:
        assert saved(tmp_path, 1, 2, 3, 4, keep=2).list() == [4, 3]
        assert names(tmp_path) == ["step-00000003", "step-00000004"]

    def test_never_deletes_the_one_just_written(self, tmp_path: Path) -> None:
        """After going back to an older step, higher-numbered checkpoints must not push the new one out."""
        saved(tmp_path, 30, 40)
        assert saved(tmp_path, 10, 20, keep=1).list() == [40, 30, 20]

    def test_old_ones_stay_when_the_new_one_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = saved(tmp_path, 1, 2, keep=2)
        monkeypatch.setattr(writer_module, "render", lambda *_: b"not a manifest")
        with pytest.raises(SaveError, match="failed verification"):
            store.save(make_state(3), {}, step=3, asynchronous=False)
        assert store.list() == [2, 1]

    def test_leftovers_of_dead_runs_go_with_the_first_save_only(self, tmp_path: Path) -> None:
        (tmp_path / ".tmp-00000001-dead").mkdir()
        (tmp_path / ".tmp-00000001-dead" / "__0_0.distcp").write_bytes(b"half")
        reader = CheckpointStore(tmp_path)
        assert reader.list() == []
        assert names(tmp_path) == [".tmp-00000001-dead"]
        saved(tmp_path, 1)
        assert names(tmp_path) == ["step-00000001"]

    def test_keep_must_be_positive(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="keep"):
            CheckpointStore(tmp_path, keep=0)


class TestMatch:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"optim.step": None}, r"'optim.step' is in the checkpoint and not in the model \(1 such difference\)"),
            ({"new": torch.zeros(1)}, "'new' is in the model and not in the checkpoint"),
            (
                {"model.a.weight": torch.zeros(3, 5)},
                r"'model.a.weight' has shape \[5, 3\] in the checkpoint and \[3, 5\]",
            ),
            ({"model.b.weight": torch.zeros(4, 4)}, "'model.b.weight' is bfloat16 in the checkpoint and float32"),
            ({"empty": None, "optim.count": None}, r"2 such differences"),
        ],
    )
    def test_difference_is_named(self, tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
        store = saved(tmp_path, 1)
        template = {key: tensor for key, tensor in {**make_template(), **change}.items() if tensor is not None}
        before = {key: tensor.clone() for key, tensor in template.items()}
        with pytest.raises(CheckpointError, match=message):
            store.load(template)
        assert_equal(template, before)
        assert store.list() == [1]


class TestPeekAndRead:
    def test_nothing_there(self, tmp_path: Path) -> None:
        assert peek_newest(tmp_path / "missing") is None
        with pytest.raises(CheckpointError, match="There is no checkpoint in"):
            CheckpointStore(tmp_path / "missing").load(make_template())

    def test_peek_reads_meta_and_moves_nothing(self, tmp_path: Path) -> None:
        saved(tmp_path, 1, 2)
        (tmp_path / "step-00000002" / "__0_0.distcp").unlink()
        peeked = peek_newest(tmp_path)
        assert peeked is not None
        assert (peeked.step, peeked.meta) == (1, {"step": 1})
        assert peeked.rejected == [("step-00000002", "__0_0.distcp: No such file or directory")]
        assert names(tmp_path) == ["step-00000001", "step-00000002"]
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
            peek_newest(tmp_path, step=2)

    def test_tensors_one_by_one(self, tmp_path: Path) -> None:
        saved(tmp_path, 1)
        assert_equal(dict(read_tensors(tmp_path / "step-00000001")), make_state(1))
        [(key, tensor)] = read_tensors(tmp_path / "step-00000001", ["model.b.weight"])
        assert key == "model.b.weight"
        assert torch.equal(tensor, make_state(1)[key])

    def test_reading_says_what_is_wrong(self, tmp_path: Path) -> None:
        saved(tmp_path, 1, 2)
        with pytest.raises(CheckpointError, match="no tensor 'nope'"):
            read_tensors(tmp_path / "step-00000001", ["nope"])
        with pytest.raises(CheckpointError, match="not a committed checkpoint"):
            read_tensors(tmp_path / ".tmp-1")
        (tmp_path / "step-00000002" / "__0_0.distcp").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"step-00000002 is damaged: __0_0\.distcp has 0 bytes") as caught:
            read_tensors(tmp_path / "step-00000002")
        assert "[1]" in caught.value.hint

    def test_names_that_only_look_like_steps(self, tmp_path: Path) -> None:
        saved(tmp_path, 1)
        for name in ("step-000000009", "step-9", "step-00000009x", "xstep-00000009"):
            (tmp_path / name).mkdir()
        assert CheckpointStore(tmp_path).list() == [1]

    def test_manifest_is_plain_json(self, tmp_path: Path) -> None:
        saved(tmp_path, 1)
        fields = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())
        assert fields["format"] == 1
        assert fields["meta"] == {"step": 1}
