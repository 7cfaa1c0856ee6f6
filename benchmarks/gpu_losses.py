"""200 steps on real text: is the fast path's loss curve the eager one's, and how far is float8's?

    python benchmarks/gpu_losses.py --out benchmarks/results/gpu_losses-DATE-h200.md
    python benchmarks/gpu_losses.py --tiny             # small and on a CPU, without a compiler: tries the code

Each curve is `weft train` as a user runs it, the same rows in the same order. The yardstick is `weft verify`'s: eager
float32 is the truth, eager bf16 with float32 master weights the reference of the same precision, and what rounding did
between these two up to a step says how far another bf16 run may be from the reference at that step
(weft/verify/tolerances.py). float8 rounds more on purpose: it is held to 1% of the reference.
"""

from __future__ import annotations

import argparse
import datetime
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from trained import metrics_of

from weft.verify.tolerances import ALONG_SHARE, UNIT_ROUNDOFF, envelope, rounded_terms, scalar_bound, scalar_drift

FLOAT8_SHARE = 0.01
SMOOTHED = 20  # steps: the rows are the same in every run, but float8's rounding is noise of its own
EAGER = {"compile.enabled": "false", "kernels.loss": "whole"}
FAST = {"precision.preset": "bf16", "compile.enabled": "true", "kernels.loss": "fused"}
CURVES = {
    "eager float32": {"precision.preset": "fp32", **EAGER},
    "eager bf16, float32 master weights": {"precision.preset": "bf16", **EAGER},
    "fast path, bf16": FAST,
    "fast path, bf16, again": FAST,
    "fast path, float8 where it pays": {**FAST, "float8.linears": "auto"},
    "fast path, float8 in all linear layers": {**FAST, "float8.linears": "all"},
}
TRUTH, REFERENCE, *_ = CURVES

MODEL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 16,
         "num_key_value_heads": 4}  # fmt: skip  # as wide as layers are for which float8 pays
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip


def train(name: str, *, steps: int, tiny: bool) -> list[float]:
    """The loss of every step."""
    config = ", ".join(f"{key} = {value}" for key, value in (TINY if tiny else MODEL).items())
    rows, sequence = (4, 32) if tiny else (16, 512)
    settings = {
        "model.type": "llama", "model.config": f"{{ {config} }}", "data.sequence_length": sequence,
        "train.global_batch": rows, "train.steps": steps, "train.learning_rate": 3e-4, "train.warmup_steps": 20,
        "checkpoint.every": 0, "evaluation.every": 0, "ledger.dry_run": "false", **CURVES[name],
    }  # fmt: skip
    if tiny:
        settings["compile.enabled"] = "false"
    return [record["loss"] for record in metrics_of(name, settings, "--device", "cpu" if tiny else "cuda")]


def share_of_bound(truth: list[float], reference: list[float], losses: list[float]) -> tuple[float, int]:
    """The largest share that a step's difference takes of what verify allows there, and which step that is."""
    allowance = rounded_terms("bfloat16", along=ALONG_SHARE)
    shares = []
    for step, (right, near, found, distance) in enumerate(
        zip(truth, reference, losses, envelope(truth, reference, least=allowance.losses), strict=True)
    ):
        drift = scalar_drift(distance=distance, size=near, roundoff=UNIT_ROUNDOFF["bfloat16"]) if step else 0.0
        bound = scalar_bound(truth=right, same_precision=near, distance=distance, drift=drift)
        shares.append(bound.share(abs(found - near)))
    worst = max(range(len(shares)), key=shares.__getitem__)
    return shares[worst], worst + 1


def smoothed(losses: list[float]) -> list[float]:
    size = min(SMOOTHED, len(losses))
    return [sum(losses[end - size : end]) / size for end in range(size, len(losses) + 1)]


def worst_ratio(reference: list[float], losses: list[float]) -> float:
    return max(abs(found / right - 1) for right, found in zip(reference, losses, strict=True))


def page(curves: dict[str, list[float]], *, steps: int, device: str) -> str:
    truth, reference = curves[TRUTH], curves[REFERENCE]
    lines = [
        f"# {steps} steps on real text, {datetime.date.today()}",
        "",
        "Caveats first: one model (a Llama of 4 blocks, 2048 wide, bytes of the Python standard library), one seed.",
        f"Bounds: bf16 within what `weft verify` allows at each step; float8 within {FLOAT8_SHARE:.0%} of the eager",
        f"bf16 run, averaged over {SMOOTHED} steps.",
        "",
        f"Device: {device}, torch {torch.__version__}. Command: `python benchmarks/gpu_losses.py`",
        "",
        "| curve | step 1 | last step | farthest from eager bf16, one step | averaged | of verify's bound | held |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, losses in curves.items():
        single, mean = worst_ratio(reference, losses), worst_ratio(smoothed(reference), smoothed(losses))
        share, step = share_of_bound(truth, reference, losses)
        is_float8, is_judged = "float8" in name, name.startswith("fast")
        told = f"{share:.3f} (step {step})" if is_judged and not is_float8 else ""
        held = "" if not is_judged else "yes" if (mean <= FLOAT8_SHARE if is_float8 else share <= 1) else "NO"
        lines.append(f"| {name} | {losses[0]:.5f} | {losses[-1]:.5f} | {single:.3%} | {mean:.3%} | {told} | {held} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=len(CURVES), help="curves that share the GPU; nothing is timed")
    parser.add_argument("--tiny", action="store_true", help="small and on a CPU")
    parser.add_argument("--out", type=Path, help="the page; beside it FILE.json with every loss")
    given = parser.parse_args()
    with ThreadPoolExecutor(given.at_once) as pool:
        found = list(pool.map(lambda name: train(name, steps=given.steps, tiny=given.tiny), CURVES))
    curves = dict(zip(CURVES, found, strict=True))
    device = "CPU" if given.tiny else torch.cuda.get_device_name()
    text = page(curves, steps=given.steps, device=device)
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")
        given.out.with_suffix(".json").write_text(json.dumps(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
