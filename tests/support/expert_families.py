"""Tiny configs of Hugging Face families with experts. For tests only."""

from __future__ import annotations

from typing import Any

_BASE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_MOE = {**_BASE, "num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK = {
    **_BASE, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**_BASE, "num_local_experts": 7, "num_experts_per_tok": 2},
    "gpt_oss": {**_BASE, "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2},  # biases, transposed
    "deepseek_v3": _DEEPSEEK,  # groups, shared experts, a dense block
    "qwen3_moe": {**_MOE, "head_dim": 8},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 24},
    "olmoe": {**_BASE, "num_experts": 5, "num_experts_per_tok": 2},
    "jamba": {**_BASE, "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
}
