"""A disk that fills up while training: one sentence, the older checkpoint, and no promise that nobody keeps."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_run import checkpoint_steps, train_here

from weft.checkpoint import writer
from weft.core.disk import no_space, writing
from weft.core.errors import DiskFullError, SaveError
from weft.core.records import StepRecord
from weft.train.folder.run_folder import RunFolder
from weft.train.loggers.tensorboard import TensorBoard
from weft.train.ranks.failures import as_weft_error

FULL = OSError(errno.ENOSPC, "No space left on device")
# A file system of 64 KiB in a mount namespace of its own, as root or as the root of a namespace of users.
ON_A_SMALL_DISK = """
mount -t tmpfs -o size=64k none "$1" && exec "$2" -c '
import sys
from pathlib import Path
from weft.core.records import StepRecord
from weft.train.folder.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    folder.metrics.append(StepRecord(step=step, loss=1.0, grad_norm=1.0, tokens=8, learning_rate=1e-3))
' "$1"
"""


def test_a_run_that_cannot_save_says_how_to_go_on(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, run = writer.CommittingWriter.write_data, tmp_path / "run"

    def full_from_step_4(self: writer.CommittingWriter, *arguments: Any) -> Any:
        if self._job.step < 4:
            return original(self, *arguments)
        with self._naming_a_full_disk(needed_bytes=5_000_000):
            raise FULL

    monkeypatch.setattr(writer.CommittingWriter, "write_data", full_from_step_4)
    settings = {"train.steps": 9, "checkpoint.every": 2, "evaluation.every": 0, "logging.tensorboard": False}
    with pytest.raises(SaveError) as caught:
        train_here(run, corpus, settings)
    assert f"No space left on device: {run / 'checkpoints'}, 4.8 MiB needed" in caught.value.message
    assert f"The run has ended; weft train --resume {run} continues from step 2." in caught.value.hint
    assert "tries again" not in caught.value.hint
    assert checkpoint_steps(run) == [2]
    assert not (run / "run.lock").exists()


def test_each_file_of_the_folder_has_its_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, path = RunFolder(tmp_path), tmp_path / "metrics.jsonl"

    def full(*_: Any, **__: Any) -> Any:
        raise FULL

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(DiskFullError, match=f"No space left on device: {path}, .* free") as caught:
        folder.metrics.append(StepRecord(step=1, loss=1.0, grad_norm=1.0, tokens=8, learning_rate=1e-3))
    assert (caught.value.code, caught.value.exit_code) == ("W603", 3)
    assert "--resume" in caught.value.hint
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DiskFullError, match="ledger"):
        folder.write_ledger({})


def test_other_errors_stay_and_a_full_disk_anywhere_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), writing(tmp_path):
        raise PermissionError(errno.EACCES, "no")
    found = as_weft_error(OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "x")))
    assert isinstance(found, DiskFullError)
    assert str(tmp_path / "x") in found.message
    assert no_space(Path("/nowhere/at/all"), needed_bytes=1024).startswith(
        "No space left on device: /nowhere/at/all, 1.0 KiB needed"
    )


def test_tensorboard_ends_and_the_run_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Full:
        def add_scalar(self, *_: Any) -> None:
            raise FULL

        def close(self) -> None:
            raise FULL

    board = TensorBoard(tmp_path)
    board._writer = Full()
    for step in (1, 2):
        board.write(step, {"train/loss": 1.0})
    board.close()
    assert capsys.readouterr().err.count("TensorBoard files are not written any more: No space left") == 1


def test_a_real_file_system_without_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", ON_A_SMALL_DISK, "sh"]
    done = subprocess.run([*unshare, str(disk), sys.executable], capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no mount namespaces here; the tests above cover the sentence")
    assert f"DiskFullError: No space left on device: {disk / 'metrics.jsonl'}, 0 B free" in done.stderr
