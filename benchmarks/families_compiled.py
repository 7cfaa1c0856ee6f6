"""Compiled blocks and a fused loss over every causal LM type of the installed transformers, against eager blocks.

    python benchmarks/families_compiled.py --out benchmarks/results/families_compiled-DATE.md [--types llama ...]

A tiny model of each type, of ten blocks where it has that many, takes three steps with `compile.enabled` and
`kernels.loss = "fused"`, and without, in float32, in one process. Graphs are captured and run by torch, not translated
to machine code: what is shown is which types can be captured, in how many graphs, and that the numbers are the same.
A type is `right`, `refused` (weft said why), `not built` (not even eager), `failed` or WRONG.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import platform
import warnings
from collections import Counter
from pathlib import Path

import tiny_families as tiny
import torch
import transformers
from families_train import time_limit
from tiny_families import Facts
from torch._dynamo.utils import counters
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import weft.engine.kernels.compiled as compiled
from weft.core.errors import WeftError
from weft.engine.kernels.fast_path import fast_path

NUM_LAYERS, LIMIT_S = 10, 120
FAST = {"compile": {"enabled": True}, "kernels": {"loss": "fused"}}


def course(model_type: str, num_layers: int, tables: Facts) -> Facts:
    torch._dynamo.reset()
    counters.clear()
    engine = tiny.engine_of(tiny.config_of(model_type, num_layers=num_layers), tables)
    gradients: Facts = {}

    def keep(found: dict[str, torch.Tensor]) -> None:
        if not gradients:
            gradients.update({name: value.clone().numpy() for name, value in found.items()})

    engine.on_gradients = keep
    with engine:
        records = [engine.step(batch) for batch in tiny.batches()]
        graphs = counters["stats"]["unique_graphs"]  # an evaluation has others
        return {
            "losses": [record.loss for record in records] + [engine.evaluate(tiny.batches()[0]).loss],
            "norms": [record.grad_norm for record in records],
            "gradients": gradients,
            "blocks": len(engine.layout.blocks),
            "graphs": graphs,
            "breaks": len(counters["graph_break"]),
            "off": "; ".join(
                f"{row.technique}: {row.why}"
                for row in fast_path(engine)
                if not row.on and row.technique in ("compiled blocks", "fused head and loss")
            ),
        }


def judge(model_type: str) -> Facts:
    row: Facts = {"type": model_type, "verdict": "not built", "why": ""}
    truth: Facts = {}
    for num_layers in (NUM_LAYERS, 2):
        try:
            with time_limit(LIMIT_S):
                truth = course(model_type, num_layers, {})
            break
        except Exception as error:  # whatever it is, the next type is asked
            row["why"] = tiny.last_line(f"{type(error).__name__}: {error}")
    if not truth:
        return row
    try:
        with time_limit(LIMIT_S):
            found = course(model_type, num_layers, FAST)
    except WeftError as error:
        return {**row, "verdict": "refused", "why": str(error)}
    except Exception as error:
        return {**row, "verdict": "failed", "why": tiny.last_line(f"{type(error).__name__}: {error}")}
    why = tiny.difference(truth, found)
    facts = {key: found[key] for key in ("blocks", "graphs", "breaks", "off")}
    return {**row, "verdict": "WRONG" if why else "right", "why": why, **facts}


def page(rows: list[Facts]) -> str:
    counts = Counter(row["verdict"] for row in rows)
    lines = [
        f"# Compiled blocks and a fused loss over causal LM types, {datetime.date.today():%Y-%m-%d}",
        "",
        "Caveats: on a CPU, float32, graphs run by torch (`aot_eager`), models of width 64; nothing of speed. Compared:"
        f" {tiny.COMPARED}.",
        "",
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()};"
        f" `python benchmarks/families_compiled.py`",
        "",
        ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()),
        "",
        "| type | verdict | blocks | graphs | kinds of breaks | off, or why |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        facts = " | ".join(str(row.get(key, "")) for key in ("blocks", "graphs", "breaks"))
        lines.append(f"| {row['type']} | {row['verdict']} | {facts} | {tiny.cell(row['why'] or row.get('off', ''))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--types", nargs="*")
    parser.add_argument("--rows", type=Path, help="a file of finished rows, to go on with")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    compiled.BACKEND = "aot_eager"
    types = options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    done = tiny.read_rows(options.rows)
    for number, model_type in enumerate(types, start=1):
        if model_type not in done:
            done[model_type] = judge(model_type)
            tiny.keep_row(options.rows, done[model_type])
        row = done[model_type]
        print(f"{number}/{len(types)} {model_type}: {row['verdict']} {row.get('graphs', '')} {row['why']}", flush=True)
    text = page([done[model_type] for model_type in types])
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
