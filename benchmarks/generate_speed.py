"""`weft generate` against transformers' own static-cache compiled generation, same model, same process, interleaved.

    python benchmarks/generate_speed.py [--layers 32] [--prompts 1 8] [--new-tokens 128] [--repeats 3]

Random weights in bfloat16, made on the device. Decode tokens per second are of whole calls after a first one that
compiles; the time of a call with one new token is taken off, as the prefill.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from weft.core.run_spec import ModelSpec
from weft.generate.load import LoadedModel
from weft.generate.sample import Sampling, sample
from weft.models.build import build_config

LAYERS_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
PROMPT_TOKENS = 256


class Tokens:
    """A tokenizer of numbers: a prompt is the seed of its random tokens."""

    pad_token_id, eos_token_id, eos_token, padding_side = 0, None, "", "left"

    def __call__(self, prompts: list[str], **options: Any) -> Any:
        rows = [
            torch.randint(5, 1000, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(int(one)))
            for one in prompts
        ]
        return Inputs(
            input_ids=torch.stack(rows), attention_mask=torch.ones(len(rows), PROMPT_TOKENS, dtype=torch.long)
        )

    def batch_decode(self, rows: list[list[int]], **options: Any) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


class Inputs(dict[str, torch.Tensor]):
    def to(self, device: torch.device) -> Inputs:
        return Inputs({name: value.to(device) for name, value in self.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-caches", nargs="*", default=["fp8", "int8", "int4"])
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = ModelSpec(type="llama", config={**LAYERS_8B, "num_hidden_layers": options.layers})
    with device:
        model = AutoModelForCausalLM.from_config(build_config(spec, vocab_size=128_256), dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    loaded = LoadedModel(model, Tokens(), None)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{device.type}, torch {torch.__version__}; {size:,} parameters")
    for count in options.prompts:
        prompts = [str(number) for number in range(count)]
        ids = Tokens()(prompts).to(device)

        def theirs(tokens: int, ids: Any = ids) -> float:
            config = GenerationConfig(
                max_new_tokens=tokens, do_sample=False, cache_implementation="static", pad_token_id=0, eos_token_id=None
            )
            return timed(lambda: model.generate(**ids, generation_config=config))

        def ours(tokens: int, kind: str = "bf16", prompts: list[str] = prompts) -> float:
            return timed(lambda: sample(loaded, prompts, Sampling(max_new_tokens=tokens, kv_cache=kind)))

        ways = {"transformers": theirs, "weft": ours}
        ways |= {f"weft {kind}": lambda tokens, kind=kind: ours(tokens, kind) for kind in options.kv_caches}
        for way in ways.values():
            way(options.new_tokens)
            way(1)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, way in ways.items():
                found[name].append(count * (options.new_tokens - 1) / (way(options.new_tokens) - way(1)))
        base = statistics.median(found["transformers"])
        for name, speeds in found.items():
            middle = statistics.median(speeds)
            print(
                f"{count} prompts  {name:14} {middle:9.1f} tokens/s  {middle / base:6.3f} of transformers", flush=True
            )


def timed(call: Any) -> float:
    sync()
    begin = time.perf_counter()
    with torch.inference_mode():
        call()
    sync()
    return time.perf_counter() - begin


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
