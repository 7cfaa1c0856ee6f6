"""Faults of disks and files under a run with states in files: each ends in one sentence that names the file."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from offloaded import digests
from samples import by_default
from state_files import close_files, committed_steps, narrow_engine
from tiny import train_steps

from weft.checkpoint.span_sums import span_sum
from weft.core.errors import BadValueError, DiskFullError, RunError, StateFileError
from weft.core.state_folder import ANY_STEP
from weft.engine.offload import local_disk
from weft.engine.offload.local_disk import file_system_of, require_local_disk

Fault = Callable[[Path, pytest.MonkeyPatch], None]


def newest(folder: Path) -> Path:
    return max(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns).with_suffix(".states")


def flipped(place: float, bit: int) -> Fault:
    """A bit of the newest file; `place`: the share of the file before it."""

    def damage(folder: Path, _patch: pytest.MonkeyPatch) -> None:
        path = newest(folder)
        with path.open("r+b") as file:
            file.seek(int(place * (path.stat().st_size - 1)))
            byte = file.read(1)[0] ^ (1 << bit)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte]))

    return damage


def cut(place: float) -> Fault:
    def damage(folder: Path, _patch: pytest.MonkeyPatch) -> None:
        path = newest(folder)
        os.truncate(path, int(place * path.stat().st_size) // 4096 * 4096)

    return damage


def page_of_zeros(folder: Path, _patch: pytest.MonkeyPatch) -> None:
    with newest(folder).open("r+b") as file:
        file.write(bytes(4096))


def file_of_the_step_before(folder: Path, _patch: pytest.MonkeyPatch) -> None:
    path = newest(folder)
    [other] = [one for one in folder.glob("*.states") if one != path]
    path.write_bytes(other.read_bytes())


def fails(name: str, code: int, *, after: int = 0) -> Fault:
    """A call of the system fails from the `after`-th time on."""

    def break_call(_folder: Path, patch: pytest.MonkeyPatch) -> None:
        original, calls = getattr(os, name), 0

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise OSError(code, os.strerror(code))
            return original(*args, **kwargs)

        patch.setattr(os, name, call)

    return break_call


DAMAGED = {
    "first bit": flipped(0.0, 0),
    "sign of the first number": flipped(3e-5, 7),
    "a bit of the first moments": flipped(0.2, 3),
    "a bit in the middle": flipped(0.45, 5),
    "a bit of the second moments": flipped(0.62, 1),
    "a bit of the weights": flipped(0.8, 6),
    "a page of zeros": page_of_zeros,
    "the file of the step before": file_of_the_step_before,
    "cut to half": cut(0.5),
    "cut by its end": cut(0.95),
    "empty": cut(0.0),
}
BROKEN = {
    "read error": fails("preadv", errno.EIO),
    "read error later": fails("preadv", errno.EIO, after=3),
    "write error": fails("pwritev", errno.EIO),
    "write error later": fails("pwritev", errno.EIO, after=5),
    "disk full": fails("pwritev", errno.ENOSPC, after=2),
    "quota": fails("pwritev", errno.EDQUOT),
    "disk gone": fails("pwritev", errno.ENODEV),
    "sync fails": fails("fdatasync", errno.EIO),
    "record not synced": fails("fsync", errno.EIO),
    "record does not fit": fails("fsync", errno.ENOSPC),
}
DEFAULT = {"a bit in the middle", "cut to half", "read error", "disk full", "record does not fit"}
EXTENDED = {"disk gone", "record not synced"}


def marked(faults: dict[str, Fault]) -> list[Any]:
    return by_default(
        [name for name in faults if name in DEFAULT], faults, extended=[name for name in faults if name in EXTENDED]
    )


def trained_until_it_fails(folder: Path, fault: Fault, patch: pytest.MonkeyPatch) -> RunError:
    engine = narrow_engine(folder)
    train_steps(engine, 3)
    assert engine.offload is not None
    engine.offload.memory.durable.join()  # type: ignore[union-attr]
    with patch.context() as within:
        fault(folder, within)
        with pytest.raises((StateFileError, DiskFullError)) as caught:
            train_steps(engine, 3, first=3)
        with pytest.raises((StateFileError, DiskFullError)):
            close_files(engine)
    return caught.value


@pytest.mark.parametrize("name", marked(DAMAGED))
def test_a_damaged_file_is_named_and_not_trusted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = trained_until_it_fails(tmp_path, DAMAGED[name], monkeypatch)
    assert (error.exit_code, error.code) == (3, "W604")
    assert str(tmp_path / "rank-0-") in error.message
    assert "--resume" in error.hint
    again = narrow_engine(tmp_path, resume=ANY_STEP)
    assert again.steps_done == 0
    assert str(tmp_path) in again.offload.memory.notes[0]  # type: ignore[union-attr]
    close_files(again)


@pytest.mark.parametrize("name", marked(BROKEN))
def test_a_broken_disk_is_named_and_the_last_committed_step_is_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = narrow_engine(tmp_path / "whole")
    error = trained_until_it_fails(tmp_path / "broken", BROKEN[name], monkeypatch)
    assert error.exit_code == 3
    assert error.code == ("W603" if error.message.startswith("No space left") else "W604")
    assert str(tmp_path / "broken") in error.message
    assert error.hint
    again = narrow_engine(tmp_path / "broken", resume=ANY_STEP)
    assert again.steps_done == max(committed_steps(tmp_path / "broken")) >= 3
    train_steps(plain, again.steps_done)
    assert digests(again) == digests(plain)
    for engine in (plain, again):
        close_files(engine)


# --- before training -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 image of 4 MiB, mounted; a file size limit could not tell a full disk from a large file."""
    image, folder = tmp_path / "disk.img", tmp_path / "disk"
    folder.mkdir()
    image.write_bytes(bytes(4 << 20))
    commands = [["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(folder)]]
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting a disk image needs root and mkfs.ext4")
    for command in commands:
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("disk images cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def test_states_that_do_not_fit_the_disk_are_refused_before_training(small_disk: Path) -> None:
    states = small_disk / "states"
    close_files(narrow_engine(states, durable="checkpoint"))
    (small_disk / "other").write_bytes(bytes(2 << 20))
    with pytest.raises(DiskFullError, match=r"rank-0-a\.states, .* needed, .* free") as caught:
        narrow_engine(states)
    assert "offload.folder" in caught.value.hint
    assert all(path.stat().st_size == 0 for path in states.glob("*.states"))


def test_a_file_size_limit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(*_args: Any) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", limited)
    with pytest.raises(DiskFullError, match=r"rank-0-a\.states"):
        narrow_engine(tmp_path)


MOUNTS = """\
21 1 8:1 / / rw - ext4 /dev/sda1 rw
22 21 0:5 / {root}/memory rw - tmpfs tmpfs rw
23 21 0:6 / {root}/layers rw - overlay overlay rw
24 21 0:7 / {root}/net rw - nfs4 server:/x rw
25 24 8:2 / {root}/net/local\\040disk rw - xfs /dev/sdb1 rw
26 21 0:8 / {root}/bucket rw - fuse.gcsfuse bucket rw
"""


def test_folders_in_memory_on_overlays_and_on_networks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(root=tmp_path), encoding="utf-8")
    for name, what in (
        ("memory", "host memory"),
        ("layers", "an overlay"),
        ("net", "nfs4"),
        ("bucket", "fuse.gcsfuse"),
    ):
        with pytest.raises(BadValueError, match=f"{name}/x is on .*{what}.*, not on a local disk") as caught:
            require_local_disk(tmp_path / name / "x", mounts=mounts)
        assert "offload.folder" in caught.value.hint
    require_local_disk(tmp_path / "net" / "local disk", mounts=mounts)
    assert file_system_of(Path("/somewhere"), mounts=mounts) == "ext4"
    assert file_system_of(Path("/"), mounts=tmp_path / "absent") == ""
    monkeypatch.setattr(local_disk.os, "pwritev", _refuses)  # type: ignore[attr-defined]
    with pytest.raises(BadValueError, match="O_DIRECT: Invalid argument"):
        require_local_disk(tmp_path / "direct")


def _refuses(*_args: Any) -> int:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_this_machines_memory_is_refused() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    with pytest.raises(BadValueError, match="tmpfs, which is host memory"):
        require_local_disk(Path("/dev/shm"))


def test_a_checksum_tells_words_and_places_of_pages() -> None:
    pages = [bytes([1]) * 4096, bytes(4096), bytes(range(256)) * 16]
    whole = b"".join(pages)
    assert span_sum(memoryview(bytes(8192))) == 0
    others = [pages[::-1], [pages[1], pages[0], pages[2]], [pages[0], pages[0], pages[2]]]
    sums = {span_sum(memoryview(b"".join(one))) for one in others}
    assert len(sums | {span_sum(memoryview(whole))}) == 4
    for bit in (0, 63, 4096 * 8, 4096 * 24 - 1):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        assert span_sum(memoryview(bytes(changed))) != span_sum(memoryview(whole))
