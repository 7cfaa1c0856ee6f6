"""Every state of a run folder, and what a start and a resume make of it. Nothing here trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.core.errors import WeftError
from weft.core.plan import Plan
from weft.core.records import StepRecord
from weft.core.run_spec import RunSpec
from weft.train.folder.lock import LOCK_NAME
from weft.train.folder.run_folder import RunFolder
from weft.train.folder.state import FolderState, look_at

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "resume-and-checkpoints.md"
NEW, FOREIGN, UNSTARTED, CUT_SHORT = (
    FolderState.NEW,
    FolderState.FOREIGN,
    FolderState.UNSTARTED,
    FolderState.CUT_SHORT,
)
UNSAVED, DAMAGED, SAVED = FolderState.UNSAVED, FolderState.DAMAGED, FolderState.SAVED


def documents(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.create(RunSpec.default(), Plan())
    return folder


def steps(path: Path) -> RunFolder:
    folder = documents(path)
    for step in (1, 2):
        folder.metrics.append(StepRecord(step=step, loss=1.0, grad_norm=1.0, tokens=8, learning_rate=1e-3))
    return folder


def nothing(path: Path) -> None: ...


def empty(path: Path) -> None:
    path.mkdir()


def only_a_lock(path: Path) -> None:
    path.mkdir()
    (path / LOCK_NAME).write_text("")


def a_file(path: Path) -> None:
    path.write_text("mine")


def users_files(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def users_documents(path: Path) -> None:
    """A run.toml and a plan.toml that somebody wrote, in the folder where the run shall go."""
    path.mkdir()
    (path / "run.toml").write_text('# mine\n[model]\ntype = "llama"\n')
    (path / "plan.toml").write_text("")


def users_model(path: Path) -> None:
    (path / "model").mkdir(parents=True)


def a_failed_start(path: Path) -> None:
    folder = documents(path)
    folder.metrics.path.write_text("")
    (folder.checkpoints_path / ".tmp-00000001-ab").mkdir(parents=True)
    folder.model_path.mkdir()


def half_a_start(path: Path) -> None:
    """Killed between the two documents."""
    documents(path)
    (path / "run.toml").unlink()


def a_failed_start_with_notes(path: Path) -> None:
    documents(path)
    (path / "notes.txt").write_text("mine")


def killed_early(path: Path) -> None:
    steps(path)


def ended_without_a_checkpoint(path: Path) -> None:
    steps(path).write_ledger({"run": {"status": "finished"}})


def damaged_only(path: Path) -> None:
    (steps(path).checkpoints_path / ".bad-step-00000002-ab").mkdir(parents=True)


def a_checkpoint(path: Path) -> None:
    (steps(path).checkpoints_path / "step-00000002").mkdir(parents=True)


def a_checkpoint_and_damaged_ones(path: Path) -> None:
    damaged_only(path)
    (path / "checkpoints" / "step-00000001").mkdir()


def finished(path: Path) -> None:
    a_checkpoint(path)
    RunFolder(path).write_ledger({"run": {"status": "finished"}})


# how it came to be: state, what a start says (a code, or None), what a resume says
STATES: dict[Callable[[Path], None], tuple[FolderState, str | None, str | None]] = {
    nothing: (NEW, None, "W501"),
    empty: (NEW, None, "W501"),
    only_a_lock: (NEW, None, "W501"),
    a_file: (FOREIGN, "W501", "W501"),
    users_files: (FOREIGN, "W501", "W501"),
    users_model: (FOREIGN, "W501", "W501"),
    users_documents: (FOREIGN, "W501", None),
    a_failed_start: (UNSTARTED, None, None),
    half_a_start: (UNSTARTED, None, "W501"),
    a_failed_start_with_notes: (FOREIGN, "W501", None),
    killed_early: (CUT_SHORT, "W501", None),
    ended_without_a_checkpoint: (UNSAVED, "W501", "W601"),
    damaged_only: (DAMAGED, "W501", "W601"),
    a_checkpoint: (SAVED, "W501", None),
    a_checkpoint_and_damaged_ones: (SAVED, "W501", None),
    finished: (SAVED, "W501", None),
}


def answer(question: Callable[[], str]) -> tuple[str | None, str]:
    """The code of a refusal with its hint, or None with the note."""
    try:
        return None, question()
    except WeftError as error:
        return error.code, error.hint


@pytest.mark.parametrize("made", STATES, ids=lambda made: made.__name__)
def test_what_may_be_done_with_a_folder(made: Callable[[Path], None], tmp_path: Path) -> None:
    made(tmp_path / "run")
    state, start, resume = STATES[made]
    look = look_at(tmp_path / "run")
    assert look.state is state
    start_code, start_words = answer(look.require_startable)
    resume_code, resume_words = answer(look.require_resumable)
    assert (start_code, resume_code) == (start, resume)
    if start_code is not None:  # a refusal sends nobody to the next refusal
        assert ("--resume" in start_words) <= (resume_code is None)
        assert "--out" in start_words
    if resume_code is None and state is not SAVED:
        assert "step 0" in resume_words


def test_a_cut_short_run_says_how_many_steps_are_run_again(tmp_path: Path) -> None:
    killed_early(tmp_path / "run")
    assert "its 2 recorded steps are repeated" in look_at(tmp_path / "run").require_resumable()


def test_the_guide_has_a_row_for_each_state() -> None:
    found = re.findall(r"^\| \*\*(.+?)\*\*", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert found == [str(state) for state in FolderState]
