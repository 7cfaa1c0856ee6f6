"""Checks an exported folder as transformers loads it: config field by field, logits, tokenizer."""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from weft.verify.oracle.config import first_difference
from weft.verify.oracle.documents import open_tokenizer
from weft.verify.oracle.facts import Tables
from weft.verify.oracle.model import Batch, PlainModel, logits_of
from weft.verify.oracle.objectives import inputs_of
from weft.verify.verdict import Check, Finding

NAME, RULE = "oracle export", 12
LOGIT_TOLERANCE = 1e-5  # of the largest logit: the same float32 forward in two models
SAMPLE = "The quick brown fox: naïve café, 東京 2024.\n\tdef f(x):\n        return x  # 'quoted'\n"


def check_export(folder: Path, asked: Any, data: Tables, plain: PlainModel, batch: Batch) -> Check:
    """Check the export in `folder`; `plain` has the exported weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    has_scores = plain.objective.has_scores  # exported as a classifier of one label
    kind = AutoModelForSequenceClassification if has_scores else AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        saved = [_as_saved(one, has_scores=has_scores) for one in (asked, plain.model.config)]
        expected, built = (one.to_dict() for one in saved)
        wrong = first_difference(expected, config.to_dict(), built, place="the exported ")
        wrong = (
            wrong
            or (None if has_scores else _wrong_generation(folder, plain))
            or _wrong_tokenizer(folder, str(data["tokenizer"]))
        )
        if wrong is not None:
            return Check.failed(NAME, wrong)
        detail = f"{len(config.to_dict())} fields of its config"
        if plain.draws_buffers:
            return Check.passed(NAME, f"{detail}; logits not judged: the model draws constants when it is built")
        model = kind.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
    right = plain.logits(batch)
    found = _scores_of(model, batch) if has_scores else logits_of(model, batch.fields)
    gap, scale = (found - right).abs().max().item(), right.abs().max().item()
    if not gap <= LOGIT_TOLERANCE * scale:
        finding = Finding(rule=RULE, expected="the logits of the trained weights", found=f"logits off by {gap:.3g}")
        return Check.failed(NAME, finding)
    return Check.passed(NAME, f"{detail}, logits of {len(batch.fields['labels'])} rows through from_pretrained")


def _scores_of(classifier: Any, batch: Batch) -> torch.Tensor:
    """The score of every token: a classifier's own forward takes one per row."""
    classifier.eval()
    with torch.no_grad():
        hidden = classifier.base_model(**inputs_of(batch.fields), use_cache=False).last_hidden_state
        scores: torch.Tensor = classifier.score(hidden)
    return scores


def _as_saved(config: Any, *, has_scores: bool) -> Any:
    """The config after saving and loading by transformers, which may change fields."""
    from transformers import AutoConfig

    config = copy.deepcopy(config)
    if has_scores:
        config.num_labels = 1
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _wrong_generation(folder: Path, plain: PlainModel) -> Finding | None:
    """Compare the generation config, if the model has one."""
    expected = getattr(plain.model, "generation_config", None)
    if expected is None or not plain.model.can_generate():
        return None
    path = folder / "generation_config.json"
    if not path.is_file():
        return Finding(rule=RULE, coordinates="the export", expected="generation_config.json", found="none")
    with tempfile.TemporaryDirectory() as scratch:
        expected.save_pretrained(scratch)
        right = json.loads(Path(scratch, "generation_config.json").read_text(encoding="utf-8"))
    found = json.loads(path.read_text(encoding="utf-8"))
    return first_difference(right, found, right, place="the exported generation ")


def _wrong_tokenizer(folder: Path, name: str) -> Finding | None:
    """Compare the exported tokenizer with the run's, if that is a local one."""
    source = Path(name).expanduser()
    if name != "bytes" and not source.exists():
        return None
    expected = list(SAMPLE.encode()) if name == "bytes" else open_tokenizer(source).encode(SAMPLE)
    try:
        found = open_tokenizer(folder).encode(SAMPLE)
    except (OSError, ValueError) as error:
        text = str(error).splitlines()[0]
        return Finding(rule=RULE, coordinates="the export", expected="a tokenizer that loads", found=text)
    if found != expected:
        return Finding(rule=RULE, coordinates="the export's tokenizer", expected=str(expected), found=str(found))
    return None
