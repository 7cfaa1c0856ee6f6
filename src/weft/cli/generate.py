"""`weft generate`: text from a run or a Hugging Face folder."""

from __future__ import annotations

import json
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.core.errors import InputError

if TYPE_CHECKING:
    import torch

    from weft.generate.ranks import RankedText
    from weft.generate.sample import Generated, Sampling
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
    nproc: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks on this machine that share the model.")] = 1,
    step: Annotated[int | None, typer.Option(min=0, help="The step of a run's checkpoint; default the newest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print texts and figures as JSON on stdout.")] = False,
) -> None:
    """Continue prompts with a trained model, on one GPU, several, or on the CPU."""
    texts = _prompts(prompt, prompts)
    kind: CacheKind = kv_cache.value
    from weft.core.quiet import quiet_libraries

    quiet_libraries()
    import torch
    from rich.console import Console

    from weft.generate.load import load
    from weft.generate.sample import Sampling, sample

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        kv_cache=kind,
    )
    with Console(stderr=True).status("loading") as status:
        if nproc > 1:
            status.update(f"generating on {nproc} ranks")
            ranked, of_step = _on_ranks(
                source, texts, sampling, num_ranks=nproc, step=step, dtype=dtype.value, device=device
            )
            made, config = ranked.made, ranked.config
        else:
            loaded = load(source, step=step, dtype=getattr(torch, dtype.value), device=device)
            status.update("generating")
            made, config, of_step, ranked = (
                sample(loaded, texts, sampling),
                loaded.model.config.to_dict(),
                loaded.step,
                None,
            )
    figures = _figures(made, config, kv_cache=kind, num_prompts=len(texts), dtype=dtype, ranked=ranked)
    if as_json:
        samples = [
            {"prompt": given, "text": text, "tokens": count}
            for given, text, count in zip(texts, made.texts, made.num_tokens, strict=True)
        ]
        print(json.dumps({"step": of_step, "samples": samples, **figures}))
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


def _on_ranks(
    source: Path,
    prompts: list[str],
    sampling: Sampling,
    *,
    num_ranks: int,
    step: int | None,
    dtype: str,
    device: torch.device,
) -> tuple[RankedText, int | None]:
    """What `num_ranks` new processes generate together, and the step of the run's checkpoint."""
    from dataclasses import asdict

    import torch

    from weft.generate.load import exported, require_room
    from weft.generate.ranks import GenerateJob, RankedText
    from weft.generate.sharded import require_shardable
    from weft.launch.local import launch

    if device.type == "cuda" and num_ranks > torch.cuda.device_count():
        raise InputError(
            f"--nproc {num_ranks} needs {num_ranks} GPUs, and there are {torch.cuda.device_count()}",
            hint="give one rank per GPU",
        )
    with (
        exported(source, step=step, dtype=getattr(torch, dtype)) as (folder, of_step),
        tempfile.TemporaryDirectory(prefix="weft-") as scratch,
    ):
        require_shardable(folder, degree=num_ranks)
        if device.type == "cpu":
            require_room(folder, device)  # ranks share the host's memory
        answer, path = Path(scratch, "answer.json"), Path(scratch, "job.json")
        job = GenerateJob(
            folder=str(folder.absolute()),
            prompts=prompts,
            num_ranks=num_ranks,
            dtype=dtype,
            answer=str(answer),
            device="cuda" if device.type == "cuda" else "cpu",
            sampling=asdict(sampling),
        )
        path.write_text(job.to_json(), encoding="utf-8")
        command = [sys.executable, "-m", "weft.generate", str(path)]
        launch(command, num_ranks=num_ranks, scratch=Path(scratch), imports=["weft.generate.ranks"])
        return RankedText.read(answer), of_step


def _figures(
    made: Generated,
    config: dict[str, Any],
    *,
    kv_cache: CacheKind,
    num_prompts: int,
    dtype: ModelDtype,
    ranked: RankedText | None,
) -> dict[str, Any]:
    num_ranks = len(ranked.weight_bytes) if ranked else 1
    cache, weights = _predicted(config, kv_cache=kv_cache, tokens=made.cached_tokens, num_ranks=num_ranks)
    has_prediction = "quantization_config" not in config and dtype is not ModelDtype.FLOAT32
    return {
        "tokens_per_s": made.tokens_per_s,
        "prefill_s": made.prefill_s,
        "decode_s": made.decode_s,
        "ranks": num_ranks,
        "memory": {
            "weights_bytes": made.weight_bytes,
            "predicted_weights_bytes": weights if has_prediction else None,
            "kv_cache_bytes": made.cache_bytes,
            "predicted_kv_cache_bytes": None if cache is None else cache * num_prompts,
            "peak_bytes": made.peak_memory_bytes,
            "weights_bytes_by_rank": ranked.weight_bytes if ranked else [made.weight_bytes],
            "kv_cache_bytes_by_rank": ranked.cache_bytes if ranked else [made.cache_bytes],
        },
        "layers_in_16_bits": made.layers_in_16_bits,
    }


def _predicted(
    config: dict[str, Any], *, kv_cache: CacheKind, tokens: int, num_ranks: int
) -> tuple[int | None, int | None]:
    """What `weft inference` predicts per rank: the cache of one sequence, and 16-bit weights; None without a shape."""
    from weft import hardware
    from weft.core.errors import WeftError
    from weft.plan.ask import resolve_model
    from weft.plan.inference import estimate_inference

    try:
        shape, _ = resolve_model(config)
    except WeftError:
        return None, None
    cluster = hardware.cluster(f"{num_ranks}xH100-80GB")  # only its number of devices is read
    found = estimate_inference(shape, cluster, cache=kv_cache, context=tokens)
    return found.cache_bytes_per_sequence, found.weight_bytes


def _lines(figures: dict[str, Any]) -> list[str]:
    from weft.core.units import format_bytes, format_seconds

    memory = figures["memory"]
    speed = f"{figures['tokens_per_s']:.1f} tokens/s" if figures["tokens_per_s"] else "one token"
    predicted = memory["predicted_kv_cache_bytes"]
    beside = f" (predicted {format_bytes(predicted)})" if predicted is not None else ""
    of_weights = memory["predicted_weights_bytes"]
    beside_weights = f" (predicted {format_bytes(of_weights)})" if of_weights is not None else ""
    each = f"; on each of {figures['ranks']} ranks" if figures["ranks"] > 1 else ";"
    weights, cache = format_bytes(memory["weights_bytes"]), format_bytes(memory["kv_cache_bytes"])
    lines = [
        f"{speed} after a prefill of {format_seconds(figures['prefill_s'])}{each} weights "
        f"{weights}{beside_weights}, cache {cache}{beside}"
    ]
    if figures["layers_in_16_bits"]:
        lines.append(f"{figures['layers_in_16_bits']} layers keep a cache of 16 bits: theirs is not keys and values")
    return lines
