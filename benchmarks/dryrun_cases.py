"""The cases of dryrun_memory.py: models, layouts, batches. Data only; imported beside the script, never by weft."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shapes import (
    COHERE,
    GEMMA2,
    GPT2_XL,
    GRANITE,
    LLAMA_1B,
    LLAMA_3B,
    LLAMA_8B,
    LLAMA_70B_20L,
    LLAMA_BYTES,
    LLAMA_BYTES_WIDE,
    MISTRAL_4L,
    MISTRAL_7B,
    MIXTRAL,
    NEOX,
    OLMO2_1B,
    OLMO2_7B,
    OLMOE,
    PHI3,
    QWEN2_1B,
    QWEN2_7B,
    QWEN3_2B,
    QWEN3_8B,
    QWEN3_MOE,
    STABLELM,
    STARCODER2,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rank's step. `rows` are this rank's sequences; `shard` x `replicate` ranks, of which it is number `rank`."""

    name: str
    kind: str
    config: dict[str, Any]
    rows: int
    length: int
    zero: int = 3
    shard: int = 1
    replicate: int = 1
    rank: int = 0
    microbatches: int = 1
    precision: str = "bf16"
    policy: str = "none"
    train: dict[str, Any] = field(default_factory=dict)
    expandable: bool = True
    note: str = ""

    @property
    def num_ranks(self) -> int:
        return self.shard * self.replicate

    def run_tables(self) -> dict[str, Any]:
        return {
            "model": {"type": self.kind, "config": self.config},
            "data": {"sequence_length": self.length},
            "train": {"global_batch": self.rows * self.num_ranks, "learning_rate": 1e-4, **self.train},
        }

    def plan_tables(self) -> dict[str, Any]:
        return {
            "mesh": {"dp_replicate": self.replicate, "dp_shard": self.shard},
            "data_parallel": {"zero": self.zero},
            "pipeline": {"microbatches": self.microbatches},
            "precision": {"preset": self.precision},
            "activations": {"policy": self.policy},
        }


FOREACH = {"optimizer_kernel": "foreach"}
SGD = {"optimizer": "sgd"}
EIGHT_BIT = {"optimizer": "adamw8bit"}
ROUTED = "random routing: how tokens fall on experts is not known beforehand"

CASES = [
    # --- one rank ---------------------------------------------------------------------------------------------------
    Case(name="llama-1b z3 2x4096", kind="llama", config=LLAMA_1B, rows=2, length=4096),
    Case(name="llama-1b z0 2x4096 fixed", kind="llama", config=LLAMA_1B, rows=2, length=4096, zero=0, expandable=False),
    Case(name="llama-1b z3 8x4096 4 micro-batches selective", kind="llama", config=LLAMA_1B, rows=8, length=4096,
         microbatches=4, policy="selective"),
    Case(name="llama-1b z3 1x16384 full foreach", kind="llama", config=LLAMA_1B, rows=1, length=16384, policy="full",
         train=FOREACH),
    Case(name="llama-1b z3 2x4096 fp16", kind="llama", config=LLAMA_1B, rows=2, length=4096, precision="fp16"),
    Case(name="llama-1b z0 1x2048 fp32", kind="llama", config=LLAMA_1B, rows=1, length=2048, zero=0, precision="fp32"),
    Case(name="llama-1b z3 2x4096 sgd", kind="llama", config=LLAMA_1B, rows=2, length=4096, train=SGD),
    Case(name="qwen3-2b z3 2x4096 foreach", kind="qwen3", config=QWEN3_2B, rows=2, length=4096, train=FOREACH),
    Case(name="qwen3-2b z2 4x2048 2 micro-batches fixed", kind="qwen3", config=QWEN3_2B, rows=4, length=2048, zero=2,
         microbatches=2, expandable=False),
    Case(name="gpt2-xl z3 4x2048", kind="gpt2", config=GPT2_XL, rows=4, length=2048),
    Case(name="gpt2-xl z0 8x2048 full sgd fused", kind="gpt2", config=GPT2_XL, rows=8, length=2048, zero=0,
         policy="full", train={**SGD, "optimizer_kernel": "fused"}),
    Case(name="gemma2 z3 1x4096 selective", kind="gemma2", config=GEMMA2, rows=1, length=4096, policy="selective"),
    Case(name="olmo2-1b z2 4x4096 selective", kind="olmo2", config=OLMO2_1B, rows=4, length=4096, zero=2,
         policy="selective"),
    Case(name="gpt_neox z1 4x4096 fixed", kind="gpt_neox", config=NEOX, rows=4, length=4096, zero=1, expandable=False),
    Case(name="phi3-4b z3 1x8192 full", kind="phi3", config=PHI3, rows=1, length=8192, policy="full"),
    Case(name="mistral-4L z0 2x16384", kind="mistral", config=MISTRAL_4L, rows=2, length=16384, zero=0),
    Case(name="qwen2-1b z2 4x4096 4 micro-batches", kind="qwen2", config=QWEN2_1B, rows=4, length=4096, zero=2,
         microbatches=4),
    Case(name="starcoder2-3b z1 1x4096 selective", kind="starcoder2", config=STARCODER2, rows=1, length=4096, zero=1,
         policy="selective"),
    Case(name="cohere z3 2x4096", kind="cohere", config=COHERE, rows=2, length=4096),
    Case(name="stablelm z0 4x4096 fixed", kind="stablelm", config=STABLELM, rows=4, length=4096, zero=0,
         expandable=False),
    Case(name="granite z3 3x4096 3 micro-batches", kind="granite", config=GRANITE, rows=3, length=4096, microbatches=3),
    Case(name="mixtral z3 4x4096", kind="mixtral", config=MIXTRAL, rows=4, length=4096, note=ROUTED),
    Case(name="olmoe z3 4x2048", kind="olmoe", config=OLMOE, rows=4, length=2048, note=ROUTED),
    # the peak lies in a block's backward, or in the update
    Case(name="llama-bytes z3 2x16384", kind="llama", config=LLAMA_BYTES, rows=2, length=16384,
         note="the peak is in a block's backward"),
    Case(name="llama-bytes-wide z3 4x16384 selective", kind="llama", config=LLAMA_BYTES_WIDE, rows=4, length=16384,
         policy="selective", note="the peak is in a block's backward, near attention's"),
    Case(name="llama-3b z3 1x2048 full foreach", kind="llama", config=LLAMA_3B, rows=1, length=2048, policy="full",
         train=FOREACH, note="the peak is in the update"),
    # --- one rank of many -------------------------------------------------------------------------------------------
    Case(name="llama-8b z3 of 8, 1x8192", kind="llama", config=LLAMA_8B, rows=1, length=8192, shard=8),
    Case(name="llama-8b z3 last of 8, 2x8192 selective", kind="llama", config=LLAMA_8B, rows=2, length=8192, shard=8,
         rank=7, policy="selective"),
    Case(name="llama-8b z1 of 8, 2x4096 2 micro-batches full", kind="llama", config=LLAMA_8B, rows=2, length=4096,
         shard=8, zero=1, microbatches=2, policy="full"),
    Case(name="llama-8b z2 of 8, 1x4096 full fixed", kind="llama", config=LLAMA_8B, rows=1, length=4096, shard=8,
         zero=2, policy="full", expandable=False),
    Case(name="qwen3-8b z3 of 8, 4x4096 4 micro-batches foreach", kind="qwen3", config=QWEN3_8B, rows=4, length=4096,
         shard=8, microbatches=4, train=FOREACH),
    Case(name="qwen3-moe z3 of 8, 2x4096", kind="qwen3_moe", config=QWEN3_MOE, rows=2, length=4096, shard=8,
         note=ROUTED),
    Case(name="mistral-7b z3 of 64, 1x16384 selective", kind="mistral", config=MISTRAL_7B, rows=1, length=16384,
         shard=64, policy="selective"),
    Case(name="olmo2-7b z3 of 64, 1x4096", kind="olmo2", config=OLMO2_7B, rows=1, length=4096, shard=64, rank=63),
    Case(name="qwen2-7b hsdp 8x8, 1x8192 selective", kind="qwen2", config=QWEN2_7B, rows=1, length=8192, shard=8,
         replicate=8, policy="selective"),
    Case(name="llama-8b hsdp 2x4 z2, 2x2048 2 micro-batches", kind="llama", config=LLAMA_8B, rows=2, length=2048,
         shard=4, replicate=2, zero=2, microbatches=2, rank=5),
    Case(name="llama-70b-20L z3 of 512, 2x8192 full", kind="llama", config=LLAMA_70B_20L, rows=2, length=8192,
         shard=512, policy="full"),
    # --- near the edge, and beyond it -------------------------------------------------------------------------------
    Case(name="large: mistral-7b z3 1x8192 full", kind="mistral", config=MISTRAL_7B, rows=1, length=8192,
         policy="full"),
    Case(name="edge below: llama-8b z3 of 64, 2x8832", kind="llama", config=LLAMA_8B, rows=2, length=8832, shard=64,
         note="must fit, barely"),
    Case(name="edge above: llama-8b z3 of 8, 2x8704", kind="llama", config=LLAMA_8B, rows=2, length=8704, shard=8,
         note="must not fit, barely"),
    Case(name="too big: llama-1b z0 11x4096", kind="llama", config=LLAMA_1B, rows=11, length=4096, zero=0,
         note="must not fit"),
    Case(name="too big: llama-8b z3 1x2048 full foreach", kind="llama", config=LLAMA_8B, rows=1, length=2048,
         policy="full", train=FOREACH, note="fits fused, must not fit with foreach"),
    Case(name="too big: qwen3-8b z1 of 8, 2x8192", kind="qwen3", config=QWEN3_8B, rows=2, length=8192, shard=8, zero=1,
         note="must not fit"),
    # --- last: these compile their update, a minute each -------------------------------------------------------------
    Case(name="llama-1b z3 2x4096 adamw8bit", kind="llama", config=LLAMA_1B, rows=2, length=4096, train=EIGHT_BIT),
    Case(name="qwen3-8b z3 of 8, 1x4096 selective adamw8bit", kind="qwen3", config=QWEN3_8B, rows=1, length=4096,
         shard=8, policy="selective", train=EIGHT_BIT),
]  # fmt: skip

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_local_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
}  # fmt: skip


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The same keys with toy sizes: to try the code without a GPU."""
    return {key: SMALL.get(key, value) for key, value in config.items()}
