"""Damage and malice: every alteration of the newest checkpoint is found, named, and the one before is loaded."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.checkpoint import CheckpointStore, read_manifest, read_tensors
from weft.checkpoint.manifest import FileRecord, Manifest, ManifestError, parse, render
from weft.core.errors import CheckpointError

OLD, NEW = "step-00000001", "step-00000002"


def make_state(step: int) -> dict[str, Tensor]:
    return {
        "a": torch.arange(400, dtype=torch.float32) * step,
        "b": torch.full((8, 8), float(step), dtype=torch.bfloat16),
        "c": torch.tensor(step),
    }


def make_template() -> dict[str, Tensor]:
    return {key: torch.zeros_like(tensor) for key, tensor in make_state(1).items()}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    store = CheckpointStore(root)
    for step in (1, 2):
        store.save(make_state(step), {"step": step}, step=step, asynchronous=False)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "checkpoints"))


def flip(path: Path, place: float, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    path.write_bytes(data)


def cut(path: Path, place: float, bit: int) -> None:
    os.truncate(path, int(place * path.stat().st_size))


def remove(path: Path, place: float, bit: int) -> None:
    path.unlink()


def grow(path: Path, place: float, bit: int) -> None:
    path.write_bytes(path.read_bytes() + b" " * (bit + 1))


def zero(path: Path, place: float, bit: int) -> None:
    size_bytes = path.stat().st_size
    path.write_bytes(path.read_bytes()[: int(place * size_bytes)].ljust(size_bytes, b"\0"))


def take_the_old_one(path: Path, place: float, bit: int) -> None:
    shutil.copy(path.parent.parent / OLD / path.name, path)


def take_another(path: Path, place: float, bit: int) -> None:
    other = sorted(entry for entry in path.parent.iterdir() if entry != path)[bit % 3]
    content = other.read_bytes()
    other.write_bytes(path.read_bytes())
    path.write_bytes(content)


def link(path: Path, place: float, bit: int) -> None:
    shutil.move(path, path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


DAMAGES = [flip, flip, flip, cut, remove, grow, zero, take_the_old_one, take_another, link]


@settings(max_examples=80)
@given(
    damage=st.sampled_from(DAMAGES),
    file=st.integers(0, 3),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_any_damage_is_found(
    pristine: Path,
    tmp_path_factory: pytest.TempPathFactory,
    damage: Callable[[Path, float, int], None],
    file: int,
    place: float,
    bit: int,
) -> None:
    root = Path(shutil.copytree(pristine, tmp_path_factory.mktemp("damaged") / "checkpoints"))
    path = sorted((root / NEW).iterdir())[file]
    before = path.read_bytes()
    damage(path, place, bit)
    assume(path.is_symlink() or not path.exists() or path.read_bytes() != before)  # e.g. both steps have equal indexes
    template = make_template()
    loaded = CheckpointStore(root).load(template)
    assert loaded.step == 1
    assert loaded.meta == {"step": 1}
    [(name, reason)] = loaded.rejected
    assert name == NEW
    assert path.name in reason or damage is take_another or "manifest of step 1" in reason
    assert all(torch.equal(template[key], tensor) for key, tensor in make_state(1).items())
    assert [entry.name[:18] for entry in root.iterdir() if entry.name.startswith(".bad-")] == [f".bad-{NEW}"]
    shutil.rmtree(root)


def test_all_four_files_are_covered(pristine: Path) -> None:
    """The campaign above names files by number."""
    assert sorted(entry.name for entry in (pristine / NEW).iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "index.json",
        "manifest.json",
    ]


def test_nothing_good_names_every_bad_one(root: Path) -> None:
    flip(root / OLD / "__0_0.distcp", 0.5, 0)
    cut(root / NEW / "__0_0.distcp", 0.5, 0)
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(root).load(make_template())
    assert f"{NEW}: __0_0.distcp has" in caught.value.message
    assert f"{OLD}: __0_0.distcp was altered" in caught.value.message


def test_asked_step_is_the_only_one_tried(root: Path) -> None:
    flip(root / NEW / "__0_0.distcp", 0.5, 0)
    with pytest.raises(CheckpointError, match="__0_0") as caught:
        CheckpointStore(root).load(make_template(), step=2)
    assert "[1]" in caught.value.hint
    with pytest.raises(CheckpointError, match="it does not exist"):
        CheckpointStore(root).load(make_template(), step=77)


def test_step_renamed_by_hand_is_refused(root: Path) -> None:
    (root / NEW).rename(root / "step-00000009")
    loaded = CheckpointStore(root).load(make_template())
    assert loaded.rejected == [("step-00000009", "step-00000009 has a manifest of step 2")]


def test_linked_directory_is_refused(root: Path) -> None:
    shutil.move(root / NEW, root / "elsewhere")
    (root / NEW).symlink_to(root / "elsewhere")
    assert CheckpointStore(root).load(make_template()).step == 1


def test_unlisted_files_are_ignored(root: Path) -> None:
    (root / NEW / ".nfs0001").write_bytes(b"left by a file system")
    assert CheckpointStore(root).load(make_template()).step == 2


def resign(directory: Path, **changes: bytes) -> None:
    """What an attacker can do: alter files and make every digest right again."""
    for name, data in changes.items():
        (directory / name).write_bytes(data)
    manifest = read_manifest(directory)
    files = dict(manifest.files)
    for name, data in changes.items():
        files[name] = FileRecord(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    fields = {**vars(manifest), "files": files}
    (directory / "manifest.json").write_bytes(render(Manifest(**fields)))


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


def test_pickle_in_metadata_never_runs(root: Path, tmp_path: Path) -> None:
    resign(root / NEW, **{".metadata": pickle.dumps(Malicious(tmp_path / "ran"))})
    template = make_template()
    assert CheckpointStore(root).load(template).step == 2
    assert torch.equal(template["a"], make_state(2)["a"])
    assert len(list(read_tensors(root / NEW))) == 3
    assert not (tmp_path / "ran").exists()


def test_pickle_in_data_never_runs(root: Path, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(Malicious(tmp_path / "ran"), buffer)
    index = json.loads((root / NEW / "index.json").read_text())
    for entry in index["tensors"].values():
        entry["chunks"][0][3:] = [0, buffer.tell()]
    changes = {"__0_0.distcp": buffer.getvalue(), "index.json": json.dumps(index).encode()}
    resign(root / NEW, **changes)
    with pytest.raises(CheckpointError, match="passed verification but cannot be read"):
        CheckpointStore(root).load(make_template())
    with pytest.raises(CheckpointError, match="passed verification but cannot be read"):
        list(read_tensors(root / NEW))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("change", [{"files": ["/etc/passwd"]}, {"files": ["../x"]}, {"tensors": {}}, {"files": []}])
def test_index_cannot_lead_out(root: Path, change: dict[str, Any]) -> None:
    index = {**json.loads((root / NEW / "index.json").read_text()), **change}
    resign(root / NEW, **{"index.json": json.dumps(index).encode()})
    with pytest.raises(CheckpointError, match=r"index\.json does not fit"):
        CheckpointStore(root).load(make_template())


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "manifest.json", "a\\b"])
def test_manifest_names_stay_inside(name: str) -> None:
    manifest = Manifest(
        step=1,
        world_size=1,
        torch_version="x",
        meta={},
        files={name: FileRecord(size_bytes=0, sha256="")},
        tensors={},
    )
    with pytest.raises(ManifestError, match="leads out"):
        parse(render(manifest))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"format": 2}'])
def test_nonsense_is_not_a_manifest(data: bytes) -> None:
    with pytest.raises(ManifestError):
        parse(data)
