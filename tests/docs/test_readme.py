"""The README's two commands and its length, what the first run shows, and the table of what works."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from blocks import ROOT, command_lines, environment, read_blocks

from weft.cli.main import app

README, STATUS, FIRST_RUN, NEXT_STEPS = (
    "README.md",
    "docs/status.md",
    "docs/start/first-run.md",
    "docs/start/next-steps.md",
)
FIRST, SECOND = command_lines(next(block for block in read_blocks(README) if block.info == "bash"))
MOST_WORDS = 900  # one screen and a table: a reader in a hurry learns what it is for
VERBS = {
    command.name or command.callback.__name__ for command in app.registered_commands if command.callback is not None
} | {str(group.typer_instance.info.name) for group in app.registered_groups if group.typer_instance is not None}
_BAR = re.compile(r"\[[█▓▒░· >]*\] *")
_NUMBER = re.compile(r"\d[\d.,]*( (K|M|MiB|GiB)|ms|s|m\d+s)?")


def table(page: str, title: str) -> list[list[str]]:
    """The rows of the first table under a heading."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = text.partition(f"# {title}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[2:]


def shapes(text: str) -> set[str]:
    """The lines of an output without its numbers."""
    return {_NUMBER.sub("#", line).strip() for line in text.splitlines() if line.strip() and line != "..."}


def test_the_setup_commands_are_the_two_that_are_run_in_a_clean_clone() -> None:
    install = ".venv/bin/pip install -q -c constraints.txt -e ."
    assert f"python3 -m venv .venv && {install} && .venv/bin/weft train" == FIRST
    assert SECOND == "scripts/test"


def test_ci_calls_the_test_command() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.strip() and not line.startswith(("#", "set ", "cd "))]
    assert commands == [SECOND, f"{SECOND} -q -m extended -n 2 --dist worksteal tests"]
    assert "-m 'not gpu and not slow and not extended'" in (ROOT / "scripts" / "test").read_text(encoding="utf-8")


def test_training_the_default_shows_and_leaves_what_the_first_page_says(tmp_path: Path) -> None:
    train = FIRST.rpartition("&& .venv/bin/")[2]
    fewer = "--set train.steps=2 --set evaluation.batches=1 --set train.global_batch=2 --out runs/default"
    done = subprocess.run(
        [*shlex.split(f"{train} {fewer}")],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = next(block.body for block in read_blocks(FIRST_RUN) if block.info == "text")
    assert shapes(shown) <= shapes(done.stderr), f"the page shows lines that are not printed:\n{done.stderr}"
    run = tmp_path / "runs" / "default"
    told = {name.rstrip("/") for row in table(FIRST_RUN, "The run folder") for name in re.findall(r"`([^`]+)`", row[0])}
    assert told == {path.name for path in run.iterdir()}


def test_planning_shows_what_the_page_says(tmp_path: Path) -> None:
    """Layouts and sentences, not figures: those move when a formula or a device's figure gets better."""
    blocks = read_blocks(NEXT_STEPS)
    (shown,) = [block.body for block in blocks if block.info == "text" and "tokens/s  MFU" in block.body]
    (command,) = [line for block in blocks for line in command_lines(block) if line.startswith("weft plan ")]
    done = subprocess.run(
        shlex.split(command),
        cwd=tmp_path,
        env={**environment(tmp_path), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert shapes(_BAR.sub("[]", shown)) <= shapes(_BAR.sub("[]", done.stdout)), done.stdout


def test_the_readme_is_one_screen_with_pictures_and_few_rows_of_comparison() -> None:
    text = (ROOT / README).read_text(encoding="utf-8")
    assert len(text.split()) < MOST_WORDS
    opening = text.partition("## ")[0]
    assert all(f"`weft {verb}`" in opening for verb in ("plan", "dryrun", "train", "verify"))
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", opening)
    assert len(pictures) == 2
    assert all((ROOT / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    rows = table(README, "Comparison with other systems")
    assert 12 <= len(rows) <= 14
    assert all("](" in row[0] for row in rows if "planned" not in row[1]), "a figure links to its dated result or page"


def test_works_is_said_only_of_what_a_test_shows() -> None:
    for capability, state, shown_by in table(STATUS, "What works"):
        word = state.partition(":")[0]
        assert word in ("works", "partial", "planned"), capability
        assert (word == "partial") == (":" in state), f"{capability}: say what is missing, and only where something is"
        assert not (word == "works" and not shown_by), f"{capability}: name the test that shows it"
        assert not (word == "planned" and shown_by), f"{capability}: what a test shows is not only planned"
        if shown_by:
            assert shown_by.startswith("tests/"), capability
            assert (ROOT / shown_by).exists(), f"{capability}: {shown_by} does not exist"


def test_verbs_are_planned_until_they_exist() -> None:
    told = {
        verb: state
        for capability, state, _ in table(STATUS, "What works")
        for verb in re.findall(r"`weft (\w+)`", capability)
    }
    assert {verb for verb, state in told.items() if state != "planned"} == VERBS


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed state of the repository, in a folder of its own without an environment."""
    folder = tmp_path_factory.mktemp("clone") / "weft"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True, timeout=120)
    return folder


@pytest.mark.slow
def test_first_command_in_a_clean_clone(clone: Path) -> None:
    done = run_as_it_stands(FIRST, clone)
    losses = re.search(r"finished at step 200: loss ([\d.]+) -> ([\d.]+)", done.stderr)
    assert losses is not None, done.stderr
    assert float(losses[2]) < 0.6 * float(losses[1])
    assert list(clone.glob("runs/*/report.html"))


@pytest.mark.slow
def test_second_command_in_a_clean_clone(clone: Path) -> None:
    assert " passed" in run_as_it_stands(SECOND, clone).stdout


def run_as_it_stands(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done
