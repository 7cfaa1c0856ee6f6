"""Low-bit key-value caches of `weft generate`: perplexity, greedy texts that stay equal, and bytes, for a trained run.

    python benchmarks/kv_cache.py RUN [--rows 16] [--prompts 200] [--new-tokens 32]

Perplexity reads held-out rows in pieces of 16 tokens, each of which sees the earlier ones through the cache. Prompts
are the first 64 tokens of held-out rows; texts are compared with those of the 16-bit cache, token by token.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from weft.core.run_spec import RunSpec
from weft.data import Loader, open_corpus
from weft.data.rows import RowLayout
from weft.generate.kv_cache import FORMATS, cache_bytes, low_bit_cache
from weft.generate.load import load

PIECE = 16
PROMPT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(options.run, step=None, dtype=torch.bfloat16, device=device).model
    rows = held_out(options.run, max(options.rows, options.prompts)).to(device)
    base, texts, size = None, None, None
    print(f"{'cache':6} {'perplexity':>10} {'change':>8} {'equal texts':>12} {'equal tokens':>13} {'bytes':>7}")
    for kind in ("bf16", *FORMATS):
        found, nbytes = perplexity(model, rows[: options.rows], kind)
        made = greedy(model, rows[: options.prompts, :PROMPT], kind, options.new_tokens)
        base, texts, size = base or found, made if texts is None else texts, size or nbytes
        same = made == texts
        print(
            f"{kind:6} {found:10.4f} {found / base - 1:+8.2%} {same.all(1).float().mean().item():12.1%}"
            f" {same.float().mean().item():13.1%} {nbytes / size:7.3f}",
            flush=True,
        )


def held_out(folder: Path, count: int) -> torch.Tensor:
    run = RunSpec.from_file(folder / "run.toml")
    split = open_corpus(run.data).evaluation
    assert split is not None, "the run holds nothing out"
    length = run.data.sequence_length
    loader = Loader(split, seed=0, global_batch=1, layout=RowLayout(sequence_length=length), epochs=1, shuffle=False)
    return torch.cat([loader.batch(row)["input_ids"] for row in range(min(count, loader.num_rows))])


def new_cache(model: Any, kind: str) -> Any:
    return DynamicCache(config=model.config) if kind == "bf16" else low_bit_cache(model.config, kind)


@torch.inference_mode()
def perplexity(model: Any, rows: torch.Tensor, kind: str) -> tuple[float, int]:
    cache, total, count = new_cache(model, kind), 0.0, 0
    for begin in range(0, rows.shape[1] - PIECE, PIECE):
        logits = model(input_ids=rows[:, begin : begin + PIECE], past_key_values=cache, use_cache=True).logits
        labels = rows[:, begin + 1 : begin + PIECE + 1].flatten()
        total += float(cross_entropy(logits.float().flatten(0, 1), labels, reduction="sum"))
        count += labels.numel()
    return math.exp(total / count), cache_bytes(cache)


@torch.inference_mode()
def greedy(model: Any, prompts: torch.Tensor, kind: str, new_tokens: int) -> torch.Tensor:
    made = []
    for batch in prompts.split(25):
        cache = new_cache(model, kind)
        logits = model(input_ids=batch, past_key_values=cache, use_cache=True).logits[:, -1]
        chosen = [logits.argmax(-1, keepdim=True)]
        for _ in range(new_tokens - 1):
            logits = model(input_ids=chosen[-1], past_key_values=cache, use_cache=True).logits[:, -1]
            chosen.append(logits.argmax(-1, keepdim=True))
        made.append(torch.cat(chosen, dim=1))
    return torch.cat(made)


if __name__ == "__main__":
    main()
