"""Texts that a run samples: those of transformers' own generation, in the run folder and its report, over a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import metrics, run_tables, stop_after, train_here
from transformers import AutoModelForCausalLM

from weft.core.errors import BadValueError, DataError
from weft.core.run_spec import RunSpec
from weft.report import write_report
from weft.train.export import export_run

PROMPTS = ["warp and ", "the loom"]
QUICK = {"measure": False, "dry_run": False}
SETTINGS: dict[str, Any] = {
    "train.steps": 6,
    "samples": {"every": 3, "prompts": PROMPTS, "max_new_tokens": 12},
    "ledger": QUICK,
    "logging.tensorboard": False,
}


def samples(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def greedy(folder: Path, prompt: str, *, most: int) -> tuple[str, int]:
    """The continuation by transformers: its text and its number of tokens."""
    ids = torch.tensor([list(prompt.encode())])
    model = AutoModelForCausalLM.from_pretrained(folder)
    made = model.generate(ids, max_new_tokens=most, do_sample=False, eos_token_id=256, pad_token_id=0)
    tokens = made[0, ids.shape[1] :].tolist()
    ended = tokens.index(256) + 1 if 256 in tokens else len(tokens)
    return bytes(one for one in tokens[:ended] if one < 256).decode(errors="replace"), ended


def test_samples_are_the_texts_that_transformers_generates(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(tmp_path / "run", corpus, SETTINGS)
    found = samples(tmp_path / "run")
    assert [(one["step"], one["prompt"]) for one in found] == [(step, p) for step in (3, 6) for p in PROMPTS]
    export_run(tmp_path / "run", tmp_path / "exported")
    for one in found[2:]:
        assert (one["text"], one["tokens"]) == greedy(tmp_path / "exported", one["prompt"], most=12)
    assert "sample of step 6: the loom -> " in capsys.readouterr().err
    # the curve is that of a run without samples
    train_here(tmp_path / "without", corpus, {**SETTINGS, "samples": {}})
    with_losses, losses = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("run", "without"))
    assert with_losses == losses
    write_report(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "after step 6" in page
    assert '<pre class="sample"><strong>the loom</strong>' in page


def test_a_resume_writes_the_samples_of_the_whole_run(tmp_path: Path, corpus: Path) -> None:
    drawn = {**SETTINGS, "samples": {**SETTINGS["samples"], "temperature": 1.0}, "checkpoint.every": 2}
    train_here(tmp_path / "whole", corpus, drawn)
    with stop_after(4):
        train_here(tmp_path / "parts", corpus, drawn)
    first = samples(tmp_path / "parts")
    assert len(first) == 2
    train_here(tmp_path / "parts", corpus, drawn, resume=True)
    assert samples(tmp_path / "parts") == samples(tmp_path / "whole")
    texts = [one["text"] for one in samples(tmp_path / "whole")]
    assert len(set(texts)) == len(texts)


def test_with_chats_a_prompt_is_a_turn_of_the_user(tmp_path: Path, corpus: Path) -> None:
    turns = [{"role": "user", "content": "warp?"}, {"role": "assistant", "content": "weft."}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(40)))
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    data = {"data.format": "chat", "data.chat_template": str(tmp_path / "chat.jinja"), "data.sequence_length": 48}
    settings = {
        **SETTINGS,
        **data,
        "train.steps": 60,
        "samples": {"every": 60, "prompts": ["warp?"], "max_new_tokens": 12},
        "evaluation.every": 0,
    }
    train_here(tmp_path / "run", tmp_path / "chats.jsonl", settings)
    assert samples(tmp_path / "run")[0]["text"].startswith("weft.")


def test_a_prompt_that_does_not_fit_is_refused(tmp_path: Path, corpus: Path) -> None:
    settings = {**SETTINGS, "samples": {"every": 1, "prompts": ["x" * 30]}}
    with pytest.raises(DataError, match="make 94 tokens, but rows have 32") as caught:
        train_here(tmp_path / "run", corpus, settings)
    assert "samples.max_new_tokens" in caught.value.hint


@pytest.mark.parametrize(("section", "words"), [({"every": 2}, "needs prompts"), ({"prompts": [""]}, "empty")])
def test_keys_that_do_not_fit_are_refused(section: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match=words):
        RunSpec.from_tables(run_tables(tmp_path, {"samples": section}))
