"""Tiny random models of the families that store their weights in different ways, and what a folder of one holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from weft.models.build import build_skeleton

_LLAMA = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_OPT = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_OLD = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# name of the case: (model type, config). gpt2 has Conv1D and ties; phi3 fuses; the moe families fuse their experts.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "gpt2": ("gpt2", _OLD | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "qwen3": ("qwen3", _LLAMA | {"head_dim": 8, "tie_word_embeddings": False}),
    "qwen3-tied": ("qwen3", _LLAMA | {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", _LLAMA | {"head_dim": 8}),
    "gemma3_text": ("gemma3_text", _LLAMA | {"head_dim": 8}),
    "gpt_neox": ("gpt_neox", _LLAMA),
    "phi3": ("phi3", _LLAMA),
    "opt": ("opt", _OLD | _OPT),
    "bloom": ("bloom", _OLD | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mixtral": ("mixtral", _LLAMA | {"num_local_experts": 5}),
    "qwen2_moe": ("qwen2_moe", _LLAMA | _EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("qwen3_moe", _LLAMA | _EXPERTS | {"head_dim": 8}),
    "deepseek_v3": (
        "deepseek_v3",
        _LLAMA | _LATENT | {"moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
                            "first_k_dense_replace": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    ),
    "gpt_oss": ("gpt_oss", _LLAMA | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip


def tiny_config(case: str) -> Any:
    model_type, fields = TINY[case]
    return CONFIG_MAPPING[model_type](**fields)


@pytest.fixture(params=sorted(TINY))
def case(request: pytest.FixtureRequest) -> str:
    """The name of each tiny model in turn."""
    return str(request.param)


@pytest.fixture
def tiny_model() -> Callable[[str], PreTrainedModel]:
    """A tiny model with every value random, so that no two tensors can be mistaken for each other."""

    def build(case: str) -> PreTrainedModel:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(case), attn_implementation="eager").eval()
        with torch.no_grad():
            for value in model.state_dict().values():
                if value.is_floating_point():
                    value.add_(torch.randn_like(value) * 0.05)
        return model

    return build


@pytest.fixture
def tiny_skeleton() -> Callable[[str], Any]:
    """The same model on the meta device."""
    return lambda case: build_skeleton(tiny_config(case), attention="eager")


@pytest.fixture
def stored_in() -> Callable[[Path], dict[str, torch.Tensor]]:
    """Every tensor in a folder's safetensors files."""

    def read(folder: Path) -> dict[str, torch.Tensor]:
        return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}

    return read
