"""Attention under a mask in pieces against the whole mask: time and memory of one rank of several, on a GPU.

    python benchmarks/row_masks.py [--length 131072] [--ranks 8]

One forward and backward of one attention layer, 16 query heads of 128 in bfloat16, zig-zag, one row, with the mask's
making; keys and values are whole already (no exchange). Versions alternate; medians.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import transformers.masking_utils as masks
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from weft.engine.cp.attention import _in_pieces
from weft.engine.cp.masks import WholeRows, mask_of
from weft.engine.cp.positions import Positions

CUDA, HEADS, WIDTH, TIMES = torch.device("cuda", 0), 16, 128, 5


def documents_of(length: int, mean: int) -> Tensor:
    borders = torch.randperm(length, generator=torch.Generator().manual_seed(0))[: length // mean]
    found = torch.zeros(1, length, dtype=torch.int64)
    found[0, borders] = 1
    return found.cumsum(1).to(CUDA)


def measured(positions: Positions, function: Any, documents: Tensor | None, *, in_pieces: bool) -> tuple[float, float]:
    """Milliseconds, and GiB beyond queries, keys and values."""
    length = positions.length
    batch = {"input_ids": torch.zeros(1, length, dtype=torch.int64, device=CUDA)}
    if documents is not None:
        batch["position_ids"] = torch.arange(length, device=CUDA)[None]
        function = masks.and_masks(function, masks.packed_sequence_mask_function(documents))
    rows = WholeRows.of(batch, positions, lambda _given: documents)
    query, key, value = (
        torch.randn(1, HEADS, count, WIDTH, device=CUDA, dtype=torch.bfloat16).requires_grad_()
        for count in (positions.own_length, length, length)
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    ask = mask_of(masks.sdpa_mask, rows, queries=positions, is_fused=True, in_pieces=in_pieces)
    mask = ask(batch_size=1, mask_function=function, device=CUDA)
    out = _in_pieces(sdpa_attention_forward, nn.Module(), query, (key, value), mask, {})[0]
    out.backward(torch.ones_like(out))
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--ranks", type=int, default=8)
    given = parser.parse_args()
    positions = Positions(length=given.length, degree=given.ranks, rank=given.ranks // 2, split="zigzag")
    cases: dict[str, tuple[Any, Tensor | None]] = {
        "window of 1,024": (masks.sliding_window_causal_mask_function(1024), None),
        "window of 4,096": (masks.sliding_window_causal_mask_function(4096), None),
        "documents of 2,048": (masks.causal_mask_function, documents_of(given.length, 2048)),
        "documents of 16,384": (masks.causal_mask_function, documents_of(given.length, 16_384)),
    }
    print("| mask | pieces, ms | whole, ms | whole / pieces | pieces, GiB | whole, GiB |\n|" + " --- |" * 6)
    for name, (function, documents) in cases.items():
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for _ in range(TIMES + 1):
            for in_pieces in found:
                found[in_pieces].append(measured(positions, function, documents, in_pieces=in_pieces))
        pieces, whole = (statistics.median(time for time, _ in found[each][1:]) for each in (True, False))
        memory = [max(gib for _, gib in found[each]) for each in (True, False)]
        print(
            f"| {name} | {pieces:.1f} | {whole:.1f} | {whole / pieces:.1f} | {memory[0]:.2f} | {memory[1]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
