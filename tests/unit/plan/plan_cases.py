"""Requests and plans for the tests of this room: small ones written out, random ones, every legal plan of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from weft import hardware, zoo
from weft.core.model_shape import ModelShape
from weft.core.plan import Plan
from weft.core.precision import policy_of
from weft.models.shape.lookup import shape_from_type
from weft.plan.columns import Columns
from weft.plan.plan_rows import columns_of
from weft.plan.request import Request, Workload
from weft.plan.rules import legal_rows
from weft.plan.space import Freedom, enumerate_plans
from weft.plan.view import View, views_of

GIB = 2**30


def request_of(
    model: str | ModelShape = "llama-3-8b",
    devices: str = "8xH100-80GB",
    *,
    global_batch: int = 8,
    sequence_length: int = 4096,
    preset: Any = "bf16",
    **workload: Any,
) -> Request:
    return Request(
        shape=zoo.named(model) if isinstance(model, str) else model,
        cluster=hardware.cluster(devices),
        workload=Workload(global_batch=global_batch, sequence_length=sequence_length, **workload),
        precision=policy_of(preset),
    )


def tiny_llama(**config: Any) -> ModelShape:
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    }
    return shape_from_type("llama", sizes | config)


def tiny_mixtral(**config: Any) -> ModelShape:
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    return shape_from_type("mixtral", sizes | config)


def plan_with(**keys: Any) -> Plan:
    """A plan from flat names: dp_shard=8, zero=3, policy="full", …; it may contradict itself, as rules must notice."""
    homes = {
        "mesh": ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"),
        "data_parallel": (
            "zero",
            "bucket_bytes",
            "find_unused_parameters",
            "all_reduce",
            "secondary_shard",
            "error_feedback",
            "reduce_neighbours",
        ),
        "tensor_parallel": ("mode", "sequence_parallel", "loss_parallel"),
        "expert_parallel": ("dispatcher", "tensor", "wire", "chunks"),
        "context_parallel": ("attention", "split", "ulysses"),
        "pipeline": ("schedule", "microbatches", "virtual_stages", "blocks"),
        "precision": ("preset",),
        "activations": ("policy", "mixture", "partition", "offload_blocks", "sequence_chunk"),
        "offload": ("optimizer", "parameters", "update", "staging_bytes", "chunk_elements", "delayed", "durable"),
        "compile": ("enabled",),
        "float8": ("linears", "gather", "recipe", "experts"),
    }
    tables = {section: {name: keys.pop(name) for name in names if name in keys} for section, names in homes.items()}
    if "offload_activations" in keys:
        tables["activations"]["offload"] = keys.pop("offload_activations")
    assert not keys, f"no such key: {keys}"
    return Plan.model_validate(tables)


def columns_with(*plans: dict[str, Any]) -> Columns:
    return columns_of([plan_with(**plan) for plan in plans])


def view_with(request: Request, place: int = 0, **keys: Any) -> View:
    """One plan seen from its first (0), middle (1) or last (2) pipeline rank."""
    return views_of(request, columns_with(keys))[place]


def one(values: Any) -> float:
    """The number of a table of one plan."""
    assert len(values) == 1
    return float(np.asarray(values)[0])


def assert_terms_add_up(terms: Mapping[Any, Any], total: Any) -> None:
    """Every term of every plan is finite and not negative; their sum is the total."""
    for term, values in terms.items():
        assert np.isfinite(values).all(), term
        assert (values >= 0).all(), term
    assert np.allclose(total, sum(terms.values()))


def legal_plans(request: Request, freedom: Freedom | None = None) -> Columns:
    """Every legal plan of a request."""
    candidates = enumerate_plans(request, freedom or Freedom())
    legal, _ = legal_rows(request, candidates)
    return candidates.take(np.flatnonzero(legal))


MODELS = st.sampled_from(
    ["gpt2", "llama-3-8b", "qwen2.5-0.5b", "gemma-2-9b", "mixtral-8x7b", "deepseek-v2-lite", "jamba-v0.1", "falcon-7b"]
)
CLUSTERS = st.sampled_from(["1xH200", "2xRTX4090", "8xH100-80GB", "2x4xA100-40GB", "2x8xV100-16GB", "3x4xH100-80GB"])
PRESETS = st.sampled_from(["fp32", "bf16", "fp16"])
OPTIMIZERS = st.sampled_from(["adamw", "sgd", "adamw8bit"])


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Any model on any small cluster; batches that divide and batches that do not."""
    return request_of(
        draw(MODELS),
        draw(CLUSTERS),
        global_batch=draw(st.sampled_from([1, 8, 12, 24, 64])),
        sequence_length=draw(st.sampled_from([512, 2048, 8192])),
        preset=draw(PRESETS),
        optimizer=draw(OPTIMIZERS),
        attention=draw(st.sampled_from(["sdpa", "eager", "fused"])),
    )
