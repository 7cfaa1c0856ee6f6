"""Linear layers in float8 on one GPU, forward and backward, eager and compiled, beside bf16: the planner's passes.

    python benchmarks/float8_layers.py --rows 16384 8192

Prints one row for each layer, ms. The constants of `plan/time/float8.py` come from here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

from weft.engine.kernels.float8 import Float8Linear

SIZES = (
    (1024, 1024), (2048, 2048), (2048, 8192), (8192, 2048), (4096, 4096), (4096, 1024), (4096, 14_336), (14_336, 4096),
    (8192, 28_672),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[16_384, 8192])
    chosen = parser.parse_args()
    print("| rows | inputs | outputs | bf16 | float8 eager | float8 compiled |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rows in chosen.rows:
        for inner, outer in SIZES:
            torch._dynamo.reset()
            cases = ((False, False), (True, False), (True, True))
            found = [layer_ms(rows, inner, outer, in_float8=short, compiled=fused) for short, fused in cases]
            print(f"| {rows} | {inner} | {outer} | " + " | ".join(f"{ms:.3f}" for ms in found) + " |", flush=True)


def layer_ms(rows: int, inner: int, outer: int, *, in_float8: bool, compiled: bool) -> float:
    layer = nn.Linear(inner, outer, bias=False, device="cuda", dtype=torch.bfloat16)
    if in_float8:
        layer.__class__ = Float8Linear
    given = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(rows, outer, device="cuda", dtype=torch.bfloat16)
    forward = torch.compile(layer, dynamic=False) if compiled else layer

    def step() -> None:
        layer.weight.grad = given.grad = None
        forward(given).backward(gradient)

    return mean_ms(step)


def mean_ms(step: Callable[[], None], *, times: int = 10) -> float:
    """The mean of `times` calls after three: one event on each side, so that launches overlap as in training."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / times


if __name__ == "__main__":
    main()
