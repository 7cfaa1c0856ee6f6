"""The planner beside Calculon (Isaev et al., SC'23) on the published Megatron-LM runs on A100s that both can describe.

    python benchmarks/planner_peer.py --calculon CHECKOUT --out benchmarks/results/planner_peer-DATE.md

CHECKOUT is a clone of calculon-ai/calculon; its imports (pandas, psutil) must be installed. Calculon computes with its
own `systems/a100_80g.json`. The runs are those of tests/support/published_runs.toml. Error = predicted / published - 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "plan"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from published_plans import comparable_runs, compare, shape_of_run
from published_runs import PublishedRun

# The eight runs that Calculon's authors validate against: its constants were chosen with these in view.
CALCULONS_OWN = ("korthikanti-22b", "korthikanti-175b", "korthikanti-530b-s", "korthikanti-530b-f", "korthikanti-1t")
CAVEATS = """Caveats first: no blind test on either side. Calculon's authors validated against the eight runs of
Korthikanti et al., weft's constants were chosen while the whole table was known. Calculon describes GPT models on its
own A100 system file (312 TFLOP/s, NVLink 300 GB/s, 25 GB/s per GPU between nodes) as it ships; it counts no head and no
embedding. Error = predicted / published - 1.
"""
RECOMPUTE = {"full": "full", "selective": "attn_only", "none": "none"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calculon", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    sys.path.insert(0, str(chosen.calculon))
    runs = [run for run in comparable_runs() if run.framework == "Megatron-LM"]
    rows = [(run, compare(run).error, peer_step_s(run, chosen.calculon) / (run.step_s or 0) - 1) for run in runs]
    text = render(rows, commit_of(chosen.calculon))
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text, encoding="utf-8")


def peer_step_s(run: PublishedRun, checkout: Path) -> float:
    """Seconds per step by Calculon."""
    from calculon import System
    from calculon.llm import Llm

    system = System(json.loads((checkout / "systems" / "a100_80g.json").read_text(encoding="utf-8")))
    model = Llm(Llm.Application(application(run)), logging.getLogger("calculon"))
    model.compile(system, Llm.Execution.from_json(execution(run)))
    model.run(system)
    return float(model.get_total_time())


def application(run: PublishedRun) -> dict[str, Any]:
    """The model: a GPT with a feed-forward layer of four times its width."""
    shape = shape_of_run(run)
    heads = shape.kinds[0].attention.num_heads
    return {
        "hidden": shape.hidden_size,
        "feedforward": 4 * shape.hidden_size,
        "seq_size": run.sequence_length,
        "attn_heads": heads,
        "attn_size": shape.hidden_size // heads,
        "num_blocks": shape.num_layers,
    }


def execution(run: PublishedRun) -> dict[str, Any]:
    has_sequence_parallelism = run.recompute == "selective"  # as in Calculon's own files for these runs
    return {
        "num_procs": run.num_devices,
        "tensor_par": run.tp,
        "pipeline_par": run.pp,
        "data_par": run.dp,
        "tensor_par_net": 0,
        "pipeline_par_net": 1,
        "data_par_net": 1,
        "batch_size": run.global_batch,
        "microbatch_size": run.micro_batch,
        "datatype": "float16",
        "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": RECOMPUTE[run.recompute],
        "pipeline_interleaving": run.virtual_stages,
        "optimizer_sharding": False,
        "tensor_par_comm_type": "rs_ag" if has_sequence_parallelism else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": has_sequence_parallelism,
        "data_par_overlap": "overlapped" in run.note,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def commit_of(checkout: Path) -> str:
    asked = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def render(rows: list[tuple[PublishedRun, float, float]], commit: str) -> str:
    own = [row for row in rows if row[0].id.startswith(CALCULONS_OWN)]
    others = [row for row in rows if row not in own]
    return "\n".join(
        [
            f"# weft plan beside Calculon on published Megatron-LM runs, {datetime.date.today().isoformat()}",
            "",
            CAVEATS,
            f"- Versions: Python {platform.python_version()}, Calculon {commit}; no torch, no device.",
            "- Command: `python benchmarks/planner_peer.py --calculon CHECKOUT --out FILE`",
            "",
            "| runs | number | weft: median size of error | largest | Calculon: median size of error | largest |",
            "| --- | --- | --- | --- | --- | --- |",
            summary("Calculon's own validation (Korthikanti et al.)", own),
            summary("the others (Narayanan et al., 530B on 2,240 GPUs)", others),
            summary("all", rows),
            "",
            "| run | published s | weft | Calculon |",
            "| --- | --- | --- | --- |",
            *(f"| {run.id} | {run.step_s:.3f} | {weft:+.1%} | {peer:+.1%} |" for run, weft, peer in rows),
            "",
        ]
    )


def summary(name: str, rows: list[tuple[PublishedRun, float, float]]) -> str:
    weft, peer = ([abs(row[side]) for row in rows] for side in (1, 2))
    figures = (f"{statistics.median(side):.1%} | {max(side):.1%}" for side in (weft, peer))
    return f"| {name} | {len(rows)} | {' | '.join(figures)} |"


if __name__ == "__main__":
    main()
