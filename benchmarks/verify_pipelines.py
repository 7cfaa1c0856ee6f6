"""`weft verify` of pipelines over structurally different model families: schedules x degrees x what is beside them.

    OMP_NUM_THREADS=1 python benchmarks/verify_pipelines.py --out FILE [--ranks 4] [--only llama …] [--per-family 8]

All plans of a family share one session. Not every combination is tried on every family: family number i begins its walk
over the combinations at another place, so that all of them together try each of them several times.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.verify.request import VerifyRequest

ROTARY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
MULTI_HEAD = {**ROTARY, "num_key_value_heads": 4}
SMALL_HEAD = {**ROTARY, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ROTARY,
    "qwen3": {**SMALL_HEAD, "tie_word_embeddings": True},
    "gemma2": {**SMALL_HEAD, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma3_text": {**SMALL_HEAD, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "phi3": {**ROTARY, "pad_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 64},
    "gpt_neox": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4},
    "mixtral": {**ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {**ROTARY, "sliding_window": 8},
    "olmo2": MULTI_HEAD,
    "granite": ROTARY,
    "cohere": ROTARY,
    "stablelm": MULTI_HEAD,
}
SCHEDULES = {
    "1f1b": 1, "zbv": 2, "gpipe": 1, "interleaved_1f1b": 2, "zero_bubble": 1, "dualpipev": 2, "looped_bfs": 2,
    "naive": 1, "pipedream_2bw": 1, "pipedream": 1,
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    "alone": {},
    "DDP": {"dp_replicate": 2},
    "ZeRO-1": {"dp_shard": 2, "zero": 1},
    "ZeRO-2": {"dp_shard": 2, "zero": 2},
    "ZeRO-3": {"dp_shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "tp x ZeRO-1": {"tp": 2, "dp_shard": 2, "zero": 1},
    "tp x ZeRO-3": {"tp": 2, "dp_shard": 2, "zero": 3},
    "HSDP": {"dp_replicate": 2, "dp_shard": 2, "zero": 2},
}
LIMIT_S = 1800


def combinations(num_ranks: int) -> list[tuple[str, int, str]]:
    """(schedule, pp, beside) of exactly so many ranks, in an order in which neighbours differ in everything."""
    found = []
    for number, (beside, schedule) in enumerate(itertools.product(BESIDE, SCHEDULES)):
        mesh = {key: size for key, size in BESIDE[beside].items() if key != "zero"}
        others = 1
        for size in mesh.values():
            others *= size
        pp = num_ranks // others
        is_delayed = schedule.startswith("pipedream")
        if pp < 2 or pp * others != num_ranks or (is_delayed and "zero" in BESIDE[beside]):
            continue
        found.append((number * 7 % 90, (schedule, pp, beside)))
    return [combination for _, combination in sorted(found)]


def plan_of(schedule: str, pp: int, beside: str) -> Plan:
    mesh = dict(BESIDE[beside])
    zero = mesh.pop("zero", 0)
    cuts = 1 if schedule == "naive" else 8 if schedule == "dualpipev" and pp == 4 else 4
    pipeline = {"schedule": schedule, "virtual_stages": SCHEDULES[schedule], "microbatches": cuts}
    given = {"mesh": {"pp": pp, **mesh}, "data_parallel": {"zero": zero}, "pipeline": pipeline}
    return Plan.from_tables(given)


def verify(family: str, plans: list[Plan], *, num_ranks: int, steps: int) -> tuple[list[dict[str, Any]], str]:
    """The verdicts, and what was said where there are none."""
    run = RunSpec.from_tables(
        {
            "model": {"type": family, "config": FAMILIES[family]},
            "data": {"source": "python-stdlib", "tokenizer": "bytes", "sequence_length": 32},
            "train": {"steps": 20, "global_batch": 16, "learning_rate": 1e-3, "warmup_steps": 2, "seed": 1},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        answer, request = Path(folder, "verdicts.json"), Path(folder, "request.json")
        request.write_text(
            VerifyRequest(run=run, plans=plans, steps=steps, as_is=True, answer=str(answer)).to_json(), encoding="utf-8"
        )
        code = (
            "import sys; from pathlib import Path; from weft.launch.local import launch;"
            f"launch([sys.executable, '-m', 'weft.verify', {str(request)!r}], num_ranks={num_ranks},"
            f" scratch=Path({folder!r}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if not answer.exists():
            return [], " ".join(done.stderr.strip().splitlines()[-2:])
        return json.loads(answer.read_text(encoding="utf-8")), ""


def page(rows: list[str], counts: tuple[int, int], *, steps: int) -> str:
    passed, tried = counts
    lines = [
        f"# weft verify of pipelines over model families, {datetime.date.today()}",
        "",
        "Caveats first: small models (64 wide, 8 layers), CPU processes on one machine, float32. Families try some",
        "combinations, all families together each of them. `margin` is the largest difference over what is allowed.",
        "",
        f"{passed} of {tried} plans pass. {steps} steps, a global batch of 16.",
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores.",
        "",
        "| family | ranks | plan | verdict | margin | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--per-family", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    possible, rows, passed, tried = combinations(given.ranks), [], 0, 0
    for family in given.only:
        first = list(FAMILIES).index(family) * given.per_family
        chosen = [possible[(first + index) % len(possible)] for index in range(min(given.per_family, len(possible)))]
        began_s = time.perf_counter()
        verdicts, note = verify(family, [plan_of(*one) for one in chosen], num_ranks=given.ranks, steps=given.steps)
        if note:
            rows.append(
                f"| {family} | {given.ranks} | all | no answer: {note} | | {time.perf_counter() - began_s:.0f} |"
            )
            tried += len(chosen)
        for verdict in verdicts:
            wrong = next((check for check in verdict["checks"] if not check["ok"]), None)
            margin = max(check["margin"] or 0.0 for check in verdict["checks"])
            told = "pass" if wrong is None else f"WRONG: {wrong['name']}: {wrong['detail']}"
            rows.append(
                f"| {family} | {given.ranks} | {verdict['plan']} | {told} | {margin:.3f} | {verdict['elapsed_s']:.0f} |"
            )
            tried, passed = tried + 1, passed + (wrong is None)
            print(rows[-1], file=sys.stderr, flush=True)
        given.out.write_text(page(rows, (passed, tried), steps=given.steps), encoding="utf-8")
    raise SystemExit(0 if passed == tried else 1)


if __name__ == "__main__":
    main()
