"""`weft inference`: memory of weights and key-value cache, and the number of sequences that fit. Exit 1 if none."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from weft.plan.inference import CacheKind, WeightKind


def inference(
    model: Annotated[str, typer.Argument(help="A model's name, a config.json or a folder with one, or a run.toml.")],
    devices: Annotated[str, typer.Option(help="8xH100-80GB, or 4x8xH100-80GB for 4 nodes of 8.")],
    weights: Annotated[WeightKind, typer.Option(help="Dtype of the weights.")] = "bf16",
    kv_cache: Annotated[CacheKind, typer.Option("--kv-cache", help="Dtype of the key-value cache.")] = "bf16",
    concurrent: Annotated[int, typer.Option(min=1, help="Concurrent sequences.")] = 1,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence; default the longest that the model takes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON on stdout.")] = False,
) -> None:
    """Estimate the memory of inference: weights and key-value cache per device. Needs neither torch nor GPUs."""
    from weft import hardware
    from weft.plan.ask import resolve_model
    from weft.plan.inference import estimate_inference

    shape, _ = resolve_model(model)
    found = estimate_inference(
        shape,
        hardware.cluster(devices),
        weights=weights,
        cache=kv_cache,
        concurrent=concurrent,
        context=context or shape.max_positions or 4096,
    )
    if as_json:
        print(json.dumps({"inference": found.as_dict()}))
    else:
        from weft.cli.plan.view import show_inference

        show_inference(shape, found)
    raise typer.Exit(code=0 if found.fits else 1)
