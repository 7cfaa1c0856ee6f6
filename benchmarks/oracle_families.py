"""The oracle over every causal LM type of the installed transformers: how often it cries wolf.

    python benchmarks/oracle_families.py --out benchmarks/results/oracle_families-DATE.md [--only llama] [--seeds 3]

Of every type a tiny model: weft's config, initial weights (several seeds), first loss and export against the oracle's.
Nothing trains: updates, schedule and data do not depend on the type. A type is `agrees`, `refused` (weft said why in a
sentence), or `alarm` with what the oracle said.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from families_train import LIMIT_S, time_limit
from tiny_families import VOCABULARY, config_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.core.errors import WeftError
from weft.engine.state import persistent_buffers
from weft.models.build import build_skeleton
from weft.models.hf_export import export_folder
from weft.models.initial import InitialWeights
from weft.models.layout import describe
from weft.verify.oracle.config import asked_config, check_config
from weft.verify.oracle.export import check_export
from weft.verify.oracle.initial import check_initial, draw_statistics
from weft.verify.oracle.loss import PLAIN
from weft.verify.oracle.model import Batch, PlainModel
from weft.verify.oracle.streams import Stream
from weft.verify.reference import token_losses

CPU, ROWS, LENGTH = torch.device("cpu"), 2, 16


@dataclass(frozen=True, kw_only=True)
class Outcome:
    model_type: str
    kind: str
    detail: str
    seconds: float


def try_type(model_type: str, *, seeds: int) -> Outcome:
    began_s = time.perf_counter()
    try:
        with time_limit(LIMIT_S):
            kind, detail = _judge(model_type, seeds=seeds)
    except WeftError as error:
        kind, detail = "refused", f"{error.code} {error}"
    except Exception as error:  # the point is to list whatever goes wrong
        kind, detail = "alarm", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return Outcome(model_type=model_type, kind=kind, detail=detail, seconds=time.perf_counter() - began_s)


def _judge(model_type: str, *, seeds: int) -> tuple[str, str]:
    given: dict[str, Any] = {}
    config = config_of(model_type, given=given)
    asked = asked_config({"type": model_type, "config": given}, config)
    plain, statistics = PlainModel(asked), draw_statistics(asked)
    checks = [check_config(asked, plain.model.config, config, vocab_size=VOCABULARY)]
    for seed in range(seeds):
        initial, source = _initial(config, seed=seed)
        checks.append(check_initial(statistics, initial, without_rule=frozenset(source.by_rule)))
    batch = _batch()
    plain.put(initial)
    told = _loss(config, plain, initial, batch)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "out")
        buffers = dict(persistent_buffers(build_skeleton(config)))
        export_folder(config, [*initial.items(), *buffers.items()], folder)
        plain.put(initial)
        checks.append(check_export(folder, asked, {"tokenizer": "none"}, plain, batch))
    wrong = [f"{check.name}: {check.detail}" for check in checks if not check.ok]
    if wrong or told.startswith("wrong"):
        return "alarm", "; ".join([*wrong, told])
    return "agrees", f"{told}; {checks[1].detail}"


def _initial(config: Any, *, seed: int) -> tuple[dict[str, torch.Tensor], InitialWeights]:
    skeleton = build_skeleton(config)
    layout = describe(skeleton)
    source = InitialWeights(skeleton, layout, seed=seed, device=CPU)
    return {name: read(()).clone() for name, read in source.readers(list(layout.unit_of))}, source


def _batch() -> Batch:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY - 1, size=ROWS * LENGTH + 1)
    stream = Stream(tokens=tokens, length=LENGTH, end=VOCABULARY - 1, isolates=False)
    return Batch.of(stream.rows(range(ROWS)), stream)


def _loss(config: Any, plain: PlainModel, initial: dict[str, torch.Tensor], batch: Batch) -> str:
    """weft's model and loss beside the plain one's, both in evaluation mode."""
    if plain.draws_buffers:
        return "loss not judged: it draws constants when it is built"
    skeleton = build_skeleton(config)
    buffers = {name: buffer.clone() for name, buffer in skeleton.named_buffers()}
    model = skeleton.to_empty(device=CPU)
    model.tie_weights()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for name, parameter in model.named_parameters():
            parameter.copy_(initial[name])
        fields = {key: torch.from_numpy(value) for key, value in batch.fields.items()}
        found = token_losses(model.eval(), fields).item() / batch.count
    right = plain.loss(batch, chunk_rows=ROWS, is_training=False)
    how = "own labels= loss" if right.own is not None else f"written out, {right.why_not_own}"
    is_right = abs(found - right.value) <= PLAIN * abs(right.value)
    return how if is_right else f"wrong loss {found:.7g}, not {right.value:.7g} ({how})"


def page(outcomes: list[Outcome], *, seeds: int) -> str:
    counts = Counter(outcome.kind for outcome in outcomes)
    lines = [
        f"# The oracle over model types, {datetime.date.today()}",
        "",
        "Caveats first: tiny models on a CPU, initial weights only, nothing trains; the seconds are no benchmark.",
        f"{seeds} seeds of initial weights per type. transformers {transformers.__version__},"
        f" torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores.",
        "",
        ", ".join(f"{count} {kind}" for kind, count in counts.most_common()),
        "",
        "| type | outcome | detail | seconds |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {outcome.model_type} | {outcome.kind} | {outcome.detail.replace('|', '/')} | {outcome.seconds:.1f} |"
        for outcome in outcomes
    ]
    return "\n".join([*lines, "", "Reproduce: `python benchmarks/oracle_families.py --out table.md`", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    outcomes: list[Outcome] = []
    for model_type in given.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        outcomes.append(try_type(model_type, seeds=given.seeds))
        print(outcomes[-1], flush=True)
        given.out.write_text(page(outcomes, seeds=given.seeds), encoding="utf-8")


if __name__ == "__main__":
    main()
