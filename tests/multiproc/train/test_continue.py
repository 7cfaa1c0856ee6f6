"""`weft train --continue`: one command starts a run, continues it after a stop, and ends at once when done."""

from __future__ import annotations

from pathlib import Path

from tiny_run import call_weft, checkpoint_steps, curve, metrics, stop_after, train_here, write_run


def test_one_command_starts_continues_and_ends(corpus: Path, cache: Path, tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run.toml", corpus), tmp_path / "queued"
    command = ("train", run, "--out", out, "--continue", "--device", "cpu")
    train_here(tmp_path / "straight", corpus)
    with stop_after(5):
        code, _, err = call_weft(*command)
    assert code == 0, err
    assert checkpoint_steps(out) == [5]

    code, _, err = call_weft(*command)
    assert code == 0, err
    assert curve(out) == curve(tmp_path / "straight")
    assert metrics(out)[-1]["step"] == 12

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    code, _, err = call_weft(*command)
    assert code == 0
    assert "has finished all 12 steps" in err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_it_overwrites_nothing_of_yours_and_needs_a_folder(corpus: Path, cache: Path, tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run.toml", corpus), tmp_path / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    code, _, err = call_weft("train", run, "--out", out, "--continue", "--device", "cpu")
    assert code == 2
    assert "error [W501]: " in err
    code, _, err = call_weft("train", run, "--continue")
    assert code == 2
    assert "error [W103]: --continue needs --out" in err
