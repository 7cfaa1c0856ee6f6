"""torchtitan's training step on one rank of a world of 8, for gpu_peers.py: its own model, parallelisation, loss,
optimizer and float8 converter, put together as its trainer does. Only the collectives are ours (weft.comm.loopback).

Written for torchtitan 0.2.2, the newest that imports on torch 2.11. `datasets` is imported by its text loader, which
is not used here: where it is missing a stand-in takes its name.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

NUM_RANKS = 8
_FFN_MULTIPLE = 64  # torchtitan rounds the width it derives up to a multiple of this


def titan_step(
    config: dict[str, Any], batches: list[torch.Tensor], *, float8: bool, recompute: str, ep: int, tiny: bool
) -> Callable[[int], torch.Tensor]:
    """The step over `batches` in turn; inside a `loopback_world` of `NUM_RANKS`. `config` is HF's of `FAMILIES`."""
    _stand_in_for_datasets()
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as titan_utils

    logging.getLogger().setLevel(logging.WARNING)  # it configures the root logger when imported
    device = batches[0].device
    _tell_device(device)
    rows, sequence = batches[0].shape
    job = _job(rows, sequence, float8=float8, recompute=recompute, tiny=tiny)
    ranks = ParallelDims(dp_replicate=1, dp_shard=NUM_RANKS, cp=1, tp=1, pp=1, ep=ep, etp=1, world_size=NUM_RANKS)
    ranks.build_mesh()

    model, parallelize = FAMILIES[config["model_type"]](config, sequence)
    converter = _float8_converter(job, ranks, model) if float8 else None
    parallelize(model, ranks, job)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    model.train()

    optimizers = build_optimizers([model], job.optimizer, ranks)
    loss_of = build_cross_entropy_loss(job)
    labels = [_next_tokens(batch) for batch in batches]
    num_labels = rows * (sequence - 1)
    parameters = list(model.parameters())

    def step(index: int) -> torch.Tensor:
        place = index % len(batches)
        logits = model(batches[place])
        loss: torch.Tensor = loss_of(logits, labels[place]) / num_labels
        del logits  # before the backward, as its trainer does: the peak would lie there
        loss.backward()
        titan_utils.clip_grad_norm_(parameters, 1.0, foreach=True, ep_enabled=ep > 1)
        optimizers.step()
        if converter is not None:
            converter.post_optimizer_hook(model)
        optimizers.zero_grad()
        return loss.detach()

    return step


def _job(rows: int, sequence: int, *, float8: bool, recompute: str, tiny: bool) -> Any:
    from torchtitan.config import JobConfig

    job = JobConfig()
    job.training.seq_len, job.training.local_batch_size = sequence, rows
    job.parallelism.data_parallel_shard_degree = NUM_RANKS
    job.compile.enable, job.compile.components = True, ["model", "loss"]
    job.activation_checkpoint.mode = recompute
    job.activation_checkpoint.selective_ac_option = "op"
    job.optimizer.lr, job.optimizer.beta1, job.optimizer.beta2, job.optimizer.weight_decay = 1e-4, 0.9, 0.95, 0.1
    job.optimizer.implementation = "fused"
    if tiny:
        job.compile.backend = "aot_eager"  # the same graphs, without minutes of a C++ compiler
    if float8:
        scaled = job.quantize.linear.float8
        scaled.filter_fqns = ["output"]
        scaled.enable_fsdp_float8_all_gather = True
        scaled.precompute_float8_dynamic_scale_for_fsdp = True
        if tiny:
            scaled.emulate, job.compile.enable = True, False  # its emulation refuses to be compiled
    return job


def _llama(config: dict[str, Any], sequence: int) -> tuple[torch.nn.Module, Callable[..., Any]]:
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama

    hidden = config["hidden_size"]
    arguments = TransformerModelArgs(
        dim=hidden,
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        ffn_dim_multiplier=config["intermediate_size"] / int(2 * 4 * hidden / 3),
        multiple_of=_FFN_MULTIPLE,
        rope_theta=500_000,
        max_seq_len=sequence,
    )
    with torch.device("meta"):
        model = Transformer(arguments)
    _require_width(model, config)
    return model, parallelize_llama


def _qwen3_moe(config: dict[str, Any], sequence: int) -> tuple[torch.nn.Module, Callable[..., Any]]:
    """Its router computes in float32, and a bias of the choice is counted: both are the defaults of its Qwen3."""
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import Qwen3ModelArgs, parallelize_qwen3
    from torchtitan.models.qwen3.model.model import Qwen3Model

    experts = MoEArgs(
        num_experts=config["num_experts"],
        num_shared_experts=0,
        top_k=config["num_experts_per_tok"],
        score_func="softmax",
        route_norm=True,
        route_scale=1.0,
        score_before_experts=False,
    )
    arguments = Qwen3ModelArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        head_dim=config["head_dim"],
        hidden_dim=config["intermediate_size"],
        max_seq_len=sequence,
        moe_enabled=True,
        moe_inter_dim=config["moe_intermediate_size"],
        moe_args=experts,
    )
    with torch.device("meta"):
        return Qwen3Model(arguments), parallelize_qwen3


FAMILIES = {"llama": _llama, "qwen3_moe": _qwen3_moe}


def _require_width(model: Any, config: dict[str, Any]) -> None:
    """Its width is derived through two roundings: another one would be another model."""
    found, wanted = model.layers["0"].feed_forward.w1.weight.shape[0], config["intermediate_size"]
    if found != wanted:
        raise ValueError(f"torchtitan made a feed-forward of {found} where {wanted} is wanted")


def _float8_converter(job: Any, ranks: Any, model: torch.nn.Module) -> Any:
    from torchtitan.components.quantization.float8 import Float8LinearConverter

    converter = Float8LinearConverter(job, ranks)
    converter.convert(model)
    return converter


def _next_tokens(batch: torch.Tensor) -> torch.Tensor:
    return torch.cat([batch[:, 1:], torch.full_like(batch[:, :1], -100)], dim=1)


def _tell_device(device: torch.device) -> None:
    """It looks for an accelerator when imported and takes CUDA for granted."""
    import torchtitan.distributed.parallel_dims as parallel_dims
    import torchtitan.distributed.utils as titan_utils

    for module in (parallel_dims, titan_utils):
        module.device_type = device.type


def _stand_in_for_datasets() -> None:
    if importlib.util.find_spec("datasets") is not None:
        return
    package, distributed = ModuleType("datasets"), ModuleType("datasets.distributed")
    package.__path__ = []
    package.Dataset, package.load_dataset = object, None  # type: ignore[attr-defined]
    distributed.split_dataset_by_node = None  # type: ignore[attr-defined]
    package.distributed = distributed  # type: ignore[attr-defined]
    sys.modules.update({"datasets": package, "datasets.distributed": distributed})
