"""A model over several tensor-parallel ranks: each reads and holds its shards, and caches keys and values of its heads.

The layers are those of training (`engine.tp`), in one dimension and without sequence parallel: all ranks have the full
hidden states and the same logits, so transformers' `generate` runs on each of them and chooses the same tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from weft.core.errors import NotBuiltError, TensorParallelError
from weft.core.plan import Plan
from weft.engine.mesh import build_topology
from weft.engine.tp.apply import apply_tensor_parallel, find_regions
from weft.engine.tp.one_d_shards import require_degree
from weft.engine.weights.materialise import materialise, replace_parameter
from weft.generate.load import LoadedModel, open_folder_tokenizer, require_room
from weft.models.build import build_on_meta
from weft.models.hf_export import is_kept_in_fp32
from weft.models.layout import describe
from weft.models.pretrained import PretrainedWeights

_GENERATION = "generation_config.json"


def require_shardable(folder: Path, *, degree: int) -> None:
    """Refuse what `load_sharded` cannot load on so many ranks; builds the model on the meta device."""
    config = _config_of(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise NotBuiltError(
            f"the weights in {folder} are quantised, and weft does not shard those",
            hint="give a folder in 16 bits, or generate with --nproc 1",
        )
    model = build_on_meta(config)
    try:
        require_degree(find_regions(model, describe(model)), degree)
    except TensorParallelError as error:
        raise TensorParallelError(
            error.message, hint="give another --nproc: a number that divides the model's heads and widths, or 1"
        ) from error


def load_sharded(folder: Path, *, degree: int, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """This rank's shards of the model in `folder`. Collective over all `degree` ranks."""
    require_room(folder, device, num_ranks=degree)
    config = _config_of(folder)
    model, skeleton = build_on_meta(config).eval().requires_grad_(False), build_on_meta(config)
    layout = describe(model)
    for name in layout.unit_of:
        kept = is_kept_in_fp32(skeleton, name, dtype)
        value = model.get_parameter(name).to(torch.float32 if kept else dtype)
        replace_parameter(model, layout, name, nn.Parameter(value, requires_grad=False))
    plan = Plan.from_tables({"mesh": {"tp": degree}, "tensor_parallel": {"sequence_parallel": False}})
    topology = build_topology(plan, device_type=device.type)
    context = apply_tensor_parallel(model, layout, plan.tensor_parallel, topology, keep_logits_full=True)
    with PretrainedWeights(folder, _as_pretrained(skeleton)) as weights:
        materialise(model, layout, weights, device=device, shards=context.shards)
    if (folder / _GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return LoadedModel(_as_pretrained(model), open_folder_tokenizer(folder), None, num_ranks=degree)


def _config_of(folder: Path) -> PretrainedConfig:
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return config


def _as_pretrained(model: nn.Module) -> PreTrainedModel:
    assert isinstance(model, PreTrainedModel)  # for the type alone: AutoModelForCausalLM builds no other
    return model
