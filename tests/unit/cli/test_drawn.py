"""Drawn combinations without ranks: each resolves or is refused with a code and a hint, alike by every verb.

`benchmarks/verify_drawn.py` verifies the same draws with ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from drawn import draw_case, setting_of
from drawn_settled import settle
from tiny_run import write_corpus

import weft.cli.dryrun.question
import weft.cli.train
import weft.cli.verify
from weft.cli.main import app
from weft.core.errors import WeftError

CHAT = [{"prompt": "the loom ", "completion": "weaves"}] * 40


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("drawn")
    chats = folder / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in CHAT), encoding="utf-8")
    return str(write_corpus(folder / "corpus")), str(chats)


def require_judged(seeds: range, inputs: tuple[str, str]) -> int:
    """Every draw is legal or refused; what trains is planned. The number of legal ones."""
    settled = {seed: settle(draw_case(seed, *inputs)) for seed in seeds}
    assert not {seed: one.wrong for seed, one in settled.items() if one.wrong}
    return sum(one.legal is not None for one in settled.values())


def test_every_draw_is_legal_or_refused_with_a_hint_that_helps(inputs: tuple[str, str]) -> None:
    assert require_judged(range(60), inputs) > 45


@pytest.mark.slow
def test_every_draw_of_many_is_legal_or_refused(inputs: tuple[str, str]) -> None:
    assert require_judged(range(1000, 2000), inputs) > 800


class StartedError(Exception):
    """Instead of ranks."""


def started(*_: Any, **__: Any) -> Any:
    raise StartedError


def asked_of(verb: str, run: Path, plan: Path, out: Path) -> tuple[str, str] | None:
    """(code, sentence) of the verb's refusal; None if it would start."""
    options = {"train": ["--out", str(out), "--device", "cpu"], "verify": ["--device", "cpu", "--steps", "20"]}
    options["dryrun"] = ["--device", "CPU"]
    try:
        app([verb, str(run), "--plan", str(plan), *options[verb]], standalone_mode=False)
    except WeftError as error:
        return error.code, error.message
    except StartedError:
        return None
    raise AssertionError(f"{verb} neither started nor refused")


def test_verbs_agree(inputs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.cli.train, "run_locked", started)
    monkeypatch.setattr(weft.cli.verify, "_run_ranks", started)
    monkeypatch.setattr(weft.cli.dryrun.question, "measure", started)
    refused = 0
    for seed in range(30):
        case = draw_case(seed, *inputs)
        run, plan = tmp_path / "run.toml", tmp_path / "plan.toml"
        case.run.get("router", {}).pop("balance_over", None)  # of which verify has no reference
        run.write_text(tomli_w.dumps(case.run), encoding="utf-8")
        plan.write_text(tomli_w.dumps(case.plan), encoding="utf-8")
        said = {verb: asked_of(verb, run, plan, tmp_path / f"out-{seed}") for verb in ("train", "verify", "dryrun")}
        assert len(set(said.values())) == 1, f"{seed}: {said}"
        refused += said["train"] is not None
    assert 3 < refused < 27


def test_settings_of_hints_are_read() -> None:
    assert setting_of("set kernels.loss = 'whole', or leave it out") == ("kernels", "loss", "whole")
    assert setting_of("set data.sequence_length to 12 or 16") == ("data", "sequence_length", 12)
    assert setting_of("choose another, or remove precision.gather") == ("precision", "gather", None)
    assert setting_of("ranks are 0 to 3") is None
