"""The price of inputs of recomputed blocks on the host: step time and peak memory on one GPU.

    python benchmarks/activation_offload.py --out benchmarks/results/activation_offload-DATE-h200.md
    python benchmarks/activation_offload.py --tensors 2 16 --out benchmarks/results/saved_tensors-DATE-h200.md

1B Llama, 4 x 4096 tokens, bf16, compiled blocks, fused loss, one rank. Engines take turns in one process: plain full
recompute, and full recompute with `activations.offload = "cpu"`. Bars: at most 1.03 of the step, and between forward
and backward less memory of the device by the inputs' size (the last one stays). The peak falls by as much only if it is
in a block with all inputs alive: with one micro-batch gradients grow faster than inputs are freed, so it may be later.

`--tensors N ...` measures saved tensors instead: all activations kept, the tensors of N blocks on the host
(`activations.offload_blocks`), and torch's `save_on_cpu` around everything. Bar: all blocks at most 0.6 of save_on_cpu.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from shapes import LLAMA_1B

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.train.bench import Bench, Timed, measure_engine

ROWS, SEQUENCE = 4, 4096
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "recompute": {"policy": "full"},
    "recompute, inputs on the host": {"policy": "full", "offload": "cpu"},
}
STEP_BAR, SAVED_BAR = 1.03, 0.98
KEPT, SAVE_ON_CPU = "kept", "save_on_cpu"
TENSORS_BAR = 0.6  # step with all blocks on the host / step with save_on_cpu


def tensor_cases(numbers: list[int]) -> dict[str, dict[str, Any]]:
    """Cases of saved tensors; they replace those of inputs."""
    away = {f"tensors of {number} blocks": {"offload": "cpu", "offload_blocks": number} for number in numbers}
    return {KEPT: {}, **away, SAVE_ON_CPU: {}}


def shape_of(*, tiny: bool) -> dict[str, Any]:
    return TINY if tiny else {**LLAMA_1B, "head_dim": 64, "tie_word_embeddings": False}


class Between:
    """Memory of the device between forward and backward, the largest of all micro-batches."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self._backward = torch.Tensor.backward

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_available():
            self.live_bytes = max(self.live_bytes, torch.cuda.memory_allocated())
        return self._backward(tensor, *args, **kwargs)


def measured(case: str, activations: dict[str, Any], *, steps: int, microbatches: int, tiny: bool) -> tuple[Timed, int]:
    rows, sequence = (2 * microbatches, 32) if tiny else (ROWS * microbatches, SEQUENCE)
    fast = {} if tiny else {"compile": {"enabled": True}, "kernels": {"loss": "fused"}}
    tables = {
        "precision": {"preset": "bf16"},
        "pipeline": {"microbatches": microbatches},
        "activations": activations,
        **fast,
    }
    run = {
        "model": {"type": "llama", "config": shape_of(tiny=tiny)},
        "data": {"sequence_length": sequence},
        "train": {"global_batch": rows},
    }
    device = torch.device("cpu") if tiny else torch.device("cuda", 0)
    bench = Bench(run=RunSpec.from_tables(run), plan=Plan.from_tables(tables), device=device, steps=steps)
    between = Between()
    hooks = torch.autograd.graph.save_on_cpu(pin_memory=not tiny) if case == SAVE_ON_CPU else nullcontext()
    with hooks, mock.patch.object(torch.Tensor, "backward", lambda *args, **kwargs: between(*args, **kwargs)):
        timed, *_ = measure_engine(bench)
    gc.collect()
    if not tiny:
        torch.cuda.empty_cache()
    return timed, between.live_bytes


def row_of(microbatches: int, found: dict[str, list[tuple[Timed, int]]]) -> str:
    plain, away = ([timed for timed, _ in each] for each in found.values())
    live = [max(nbytes for _, nbytes in each) for each in found.values()]
    step_ms = [statistics.median(one.step_s for one in timed) * 1e3 for timed in (plain, away)]
    peaks = [max(one.peak_allocated_bytes for one in timed) for timed in (plain, away)]
    inputs = (LLAMA_1B["num_hidden_layers"] - 1) * ROWS * SEQUENCE * LLAMA_1B["hidden_size"] * 2
    saved = live[0] - live[1]
    ratio = step_ms[1] / step_ms[0]
    verdict = "pass" if ratio <= STEP_BAR and saved >= SAVED_BAR * inputs else "MISS"
    same = {one.loss_last for one in (*plain, *away)}
    cells = [
        str(microbatches),
        *(f"{ms:.1f}" for ms in step_ms),
        f"{ratio:.3f}",
        *(f"{peak / 2**30:.2f}" for peak in peaks),
        f"{saved / 2**30:.2f} of {inputs / 2**30:.2f}",
        "equal" if len(same) == 1 else "DIFFER",
        verdict,
    ]
    return "| " + " | ".join(cells) + " |"


def tensor_row(microbatches: int, found: dict[str, list[tuple[Timed, int]]]) -> list[str]:
    """One line per case: its step beside that of kept activations and of save_on_cpu."""
    step_ms = {case: statistics.median(one.step_s for one, _ in each) * 1e3 for case, each in found.items()}
    losses = {one.loss_last for each in found.values() for one, _ in each}
    lines = []
    for case, each in found.items():
        peak, live = max(one.peak_allocated_bytes for one, _ in each), max(nbytes for _, nbytes in each)
        cells = [
            str(microbatches),
            case,
            f"{step_ms[case]:.1f}",
            f"{step_ms[case] / step_ms[KEPT]:.3f}",
            f"{step_ms[case] / step_ms[SAVE_ON_CPU]:.3f}",
            f"{peak / 2**30:.2f}",
            f"{live / 2**30:.2f}",
            "equal" if len(losses) == 1 else "DIFFER",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


TENSOR_HEADER = [
    "| micro-batches | case | step, ms | of kept | of save_on_cpu | peak GiB | GiB before the backward | losses |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--microbatches", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="small and on a CPU: tries the code, measures nothing")
    parser.add_argument("--tensors", nargs="+", type=int, help="saved tensors of so many blocks instead of inputs")
    options = parser.parse_args()
    cases = tensor_cases(options.tensors) if options.tensors else CASES
    rows: list[str] = []
    for microbatches in options.microbatches:
        found: dict[str, list[tuple[Timed, int]]] = {case: [] for case in cases}
        for _ in range(options.rounds):
            for case, timed in found.items():
                timed.append(
                    measured(case, cases[case], steps=options.steps, microbatches=microbatches, tiny=options.tiny)
                )
                one, live_bytes = timed[-1]
                print(
                    f"{microbatches} micro-batches, {case}: {one.step_s * 1e3:.1f} ms,"
                    f" {one.peak_allocated_bytes / 2**30:.2f} GiB at the peak,"
                    f" {live_bytes / 2**30:.2f} GiB between forward and backward, loss {one.loss_last:.6f}",
                    flush=True,
                )
        rows += tensor_row(microbatches, found) if options.tensors else [row_of(microbatches, found)]
        print(*rows, sep="\n", flush=True)
    name = "a CPU" if options.tiny else torch.cuda.get_device_name()
    about = f"{name}, torch {torch.__version__}, {datetime.date.today()}. 1B Llama, {ROWS} x {SEQUENCE} tokens per"
    if options.tensors:
        page = [
            "# Saved tensors of blocks on the host",
            "",
            about,
            "micro-batch, bf16, compiled blocks, fused loss, one rank. Medians of the steps of engines in turns.",
            f"Bar: with all blocks at most {TENSORS_BAR} of the step with save_on_cpu.",
            "",
            *TENSOR_HEADER,
            *rows,
        ]
    else:
        page = [
            "# Inputs of recomputed blocks on the host",
            "",
            about,
            "micro-batch, bf16, compiled blocks, fused loss, one rank. Medians of the steps of engines in turns.",
            f"Bars: {STEP_BAR} of the step, {SAVED_BAR} of all inputs but one off the device before the backward.",
            "",
            "| micro-batches | recompute, ms | inputs on the host, ms | ratio | peak GiB, recompute |"
            " peak GiB, on the host | GiB saved between forward and backward | losses | verdict |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *rows,
        ]
    if options.out:
        options.out.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
