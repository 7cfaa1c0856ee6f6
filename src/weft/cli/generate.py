"""`weft generate`: text from a run or a Hugging Face folder."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.core.errors import InputError

if TYPE_CHECKING:
    from weft.generate.sample import Generated
    from weft.plan.inference import CacheKind


class CacheDtype(StrEnum):
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


class ModelDtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def generate(
    source: Annotated[Path, typer.Argument(help="A run folder, or a Hugging Face folder as `weft export` writes it.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; give several for a batch.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt per line.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to sample per prompt.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from this share of the probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from so many tokens; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="The seed of sampling.")] = 0,
    kv_cache: Annotated[CacheDtype, typer.Option("--kv-cache", help="The key-value cache's format.")] = CacheDtype.BF16,
    dtype: Annotated[ModelDtype, typer.Option(help="The dtype of weights that are not low-bit.")] = ModelDtype.BFLOAT16,
    step: Annotated[int | None, typer.Option(min=0, help="The step of a run's checkpoint; default the newest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print texts and figures as JSON on stdout.")] = False,
) -> None:
    """Continue prompts with a trained model, on one GPU or on the CPU."""
    texts = _prompts(prompt, prompts)
    kind: CacheKind = kv_cache.value
    from weft.core.quiet import quiet_libraries

    quiet_libraries()
    import torch
    from rich.console import Console

    from weft.generate.load import load
    from weft.generate.sample import Sampling, sample

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Console(stderr=True).status("loading") as status:
        loaded = load(source, step=step, dtype=getattr(torch, dtype.value), device=device)
        status.update("generating")
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            kv_cache=kind,
        )
        made = sample(loaded, texts, sampling)
    figures = _figures(made, loaded.model.config.to_dict(), kv_cache=kind, num_prompts=len(texts))
    if as_json:
        samples = [
            {"prompt": given, "text": text, "tokens": count}
            for given, text, count in zip(texts, made.texts, made.num_tokens, strict=True)
        ]
        print(json.dumps({"step": loaded.step, "samples": samples, **figures}))
        return
    for given, text in zip(texts, made.texts, strict=True):
        print(f"{given}{text}")
    for line in _lines(figures):
        print(line, file=sys.stderr)


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    found = list(given or [])
    if file is not None:
        if not file.is_file():
            raise InputError(f"there is no file {file}", hint="--prompts takes a text file with one prompt per line")
        found += [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    if not found:
        raise InputError("there is no prompt", hint='give --prompt "..." or --prompts FILE')
    return found


def _figures(made: Generated, config: dict[str, Any], *, kv_cache: CacheKind, num_prompts: int) -> dict[str, Any]:
    predicted = _predicted_cache_bytes(config, kv_cache=kv_cache, tokens=made.cached_tokens)
    return {
        "tokens_per_s": made.tokens_per_s,
        "prefill_s": made.prefill_s,
        "decode_s": made.decode_s,
        "memory": {
            "weights_bytes": made.weight_bytes,
            "kv_cache_bytes": made.cache_bytes,
            "predicted_kv_cache_bytes": None if predicted is None else predicted * num_prompts,
            "peak_bytes": made.peak_memory_bytes,
        },
        "layers_in_16_bits": made.layers_in_16_bits,
    }


def _predicted_cache_bytes(config: dict[str, Any], *, kv_cache: CacheKind, tokens: int) -> int | None:
    """What `weft inference` predicts for one sequence; None where it has no shape for the model."""
    from weft import hardware
    from weft.core.errors import WeftError
    from weft.plan.ask import resolve_model
    from weft.plan.inference import estimate_inference

    try:
        shape, _ = resolve_model(config)
    except WeftError:
        return None
    cluster = hardware.cluster("1xH100-80GB")  # of no influence on the bytes of one device's cache
    return estimate_inference(shape, cluster, cache=kv_cache, context=tokens).cache_bytes_per_sequence


def _lines(figures: dict[str, Any]) -> list[str]:
    from weft.core.units import format_bytes, format_seconds

    memory = figures["memory"]
    speed = f"{figures['tokens_per_s']:.1f} tokens/s" if figures["tokens_per_s"] else "one token"
    predicted = memory["predicted_kv_cache_bytes"]
    beside = f" (predicted {format_bytes(predicted)})" if predicted is not None else ""
    lines = [
        f"{speed} after a prefill of {format_seconds(figures['prefill_s'])}; weights "
        f"{format_bytes(memory['weights_bytes'])}, cache {format_bytes(memory['kv_cache_bytes'])}{beside}"
    ]
    if figures["layers_in_16_bits"]:
        lines.append(f"{figures['layers_in_16_bits']} layers keep a cache of 16 bits: theirs is not keys and values")
    return lines
