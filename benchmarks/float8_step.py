"""Steps of a model of 8B with block-wise float8 against tensor-wise, row-wise and bf16, on one GPU. Under four minutes.

    python benchmarks/float8_step.py [--layers 8] [--rows 8192] [--seconds 200]

The blocks of Llama-3-8B, compiled, forward and backward of `--layers` of them (all blocks are alike; head and optimizer
are the same for every recipe and left out). Wanted: block-wise at least 0.95 of tensor-wise; it is 0.871
(`results/float8_step-2026-11-19-h200.md`). Prints a table last.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from float8_layers import mean_ms
from torch import nn

from weft.core.float8_section import Float8
from weft.core.run_spec import ModelSpec
from weft.engine.kernels.float8 import apply_float8
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe

SIZES = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16", {"linears": "none"}),
    *((recipe, {"linears": "all", "recipe": recipe}) for recipe in ("tensorwise", "blockwise", "rowwise")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=200.0)
    chosen = parser.parse_args()
    began_s, found = time.perf_counter(), {}
    for name, keys in CASES:
        if time.perf_counter() - began_s < chosen.seconds:
            found[name] = blocks_ms(Float8(**keys), layers=chosen.layers, rows=chosen.rows)
            print(f"{name}: {found[name]:.2f} ms, {time.perf_counter() - began_s:.0f} s so far", flush=True)
    plain = found["tensorwise"]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {chosen.layers} blocks, {chosen.rows} tokens")
    print("| recipe | ms forward and backward | speed, tensorwise = 1 |")
    print("| --- | --- | --- |")
    for name, ms in found.items():
        print(f"| {name} | {ms:.2f} | {plain / ms:.3f} |")


def blocks_ms(float8: Float8, *, layers: int, rows: int) -> float:
    torch._dynamo.reset()
    device = torch.device("cuda")
    config = build_config(ModelSpec(type="llama", config={**SIZES, "num_hidden_layers": layers}), vocab_size=256)
    model: Any = build_skeleton(config).to_empty(device=device).bfloat16()
    with torch.no_grad():
        for value in model.parameters():
            nn.init.normal_(value, std=0.02)
    layout = describe(model)
    apply_float8(model, layout, float8, full=layout, tp=None, device=device)
    for name in layout.blocks:
        model.get_submodule(name).compile(dynamic=False)
    ids = torch.randint(0, 256, (1, rows), device=device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, use_cache=False).logits.float().mean().backward()

    return mean_ms(step, times=5)


if __name__ == "__main__":
    main()
