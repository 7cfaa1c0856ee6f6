"""Recipes of low-precision products on a CPU: bytes of scales, error of each product, loss after some hundred steps.

    python benchmarks/float8_recipes.py [--steps 500] [--recipes blockwise ...]

Errors are those of the three products of a linear layer against float64, of operands with rows and columns of uneven
size (factors exp(0.5 n)). Losses: a small mixture of experts on the running Python's own source, one byte a token, the
same batches for every format; the mean of the last 50 steps. A CPU emulates: this says nothing about speed.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft import Plan
from weft.core.float8_section import RECIPES, Float8Recipe
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.kernels.float8 import scaled_product
from weft.engine.kernels.float8_scaling import Scaling
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe

SCALES = {
    "tensorwise": "0", "rowwise": "4 / K", "blockwise": "4 / 128; weight 4 / 16,384", "mxfp8": "1 / 32",
    "nvfp4": "1 / 16, values 1 / 2",
}  # fmt: skip
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
ROWS, LENGTH, LAST = 8, 64, 50


def errors(recipe: Float8Recipe) -> list[float]:
    """Of output, gradient of the input and gradient of the weight."""
    generator = torch.Generator().manual_seed(0)

    def uneven(rows: int, columns: int) -> Tensor:
        spread = torch.randn(rows, 1, generator=generator) + torch.randn(1, columns, generator=generator)
        return (torch.randn(rows, columns, generator=generator) * (0.5 * spread).exp()).bfloat16()

    x, w, g = uneven(512, 1024).requires_grad_(), uneven(768, 1024).requires_grad_(), uneven(512, 768)
    made = scaled_product(x, w, Scaling(recipe))
    made.backward(g)  # type: ignore[no-untyped-call]
    a, b, c = x.detach().double(), w.detach().double(), g.double()
    pairs = [(made, a @ b.t()), (x.grad, c @ b), (w.grad, c.t() @ a)]
    return [
        float((found.detach().double() - right).norm() / right.norm()) for found, right in pairs if found is not None
    ]


def text() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)))


def loss_after(tables: dict[str, Any], steps: int, data: Tensor) -> float:
    config = build_config(ModelSpec(type="mixtral", config=SIZES), vocab_size=257)
    skeleton = build_skeleton(config)
    engine = Engine(
        build_skeleton(config), Plan.from_tables(tables), optimizer=OptimizerPolicy(learning_rate=2e-3),
        weights=InitialWeights(skeleton, describe(skeleton), seed=0, device=torch.device("cpu")),
        device=torch.device("cpu"),
    )  # fmt: skip
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        at = torch.randint(0, len(data) - LENGTH - 1, (ROWS,), generator=generator)
        rows = torch.stack([data[begin : begin + LENGTH + 1] for begin in at])
        losses.append(engine.step({"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}).loss)
    last = losses[-LAST:]
    return sum(last) / len(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = text()
    plans: dict[str, dict[str, Any]] = {"bf16": {"precision": {"preset": "bf16"}}}
    for recipe in args.recipes:
        float8 = {"linears": "all", "experts": "all", "recipe": recipe}
        plans[recipe] = {"precision": {"preset": "bf16"}, "float8": float8}
    plans["deepseek-v3"] = {"precision": {"preset": "deepseek-v3"}}
    print("| format | bytes of scales per number | error of y, dx, dw | loss | to bf16 | s |")
    print("| --- | --- | --- | --- | --- | --- |")
    plain = 0.0
    for name, tables in plans.items():
        began_s = time.perf_counter()
        loss = loss_after(tables, args.steps, data)
        plain = plain or loss
        found = ", ".join(f"{error:.2%}" for error in errors(name)) if name in RECIPES else ""
        took_s = time.perf_counter() - began_s
        print(
            f"| {name} | {SCALES.get(name, '')} | {found} | {loss:.4f} | {loss / plain - 1:+.2%} | {took_s:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
