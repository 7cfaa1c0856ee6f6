"""The activation formulas against autograd itself: the bytes a block of each family really keeps, in bfloat16.

saved(3 blocks) - saved(2 blocks) is one block's; storages are counted once, parameters and shared tables not at all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft import zoo
from weft.core.run_spec import ModelSpec
from weft.models.build import build_config, build_skeleton
from weft.plan.activations import kept_by

ROWS, LENGTH = 2, 96
ROTARY = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 2}
MULTI_HEAD = {**ROTARY, "num_key_value_heads": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ROTARY,
    "mistral": {**ROTARY, "sliding_window": None},
    "qwen2": ROTARY,
    "qwen3": {**ROTARY, "head_dim": 16},
    "olmo": MULTI_HEAD,
    "olmo2": MULTI_HEAD,
    "gemma": {**ROTARY, "head_dim": 32},
    "gemma2": {**ROTARY, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4096},
    "phi3": {**MULTI_HEAD, "pad_token_id": 0, "sliding_window": None},
    "gpt_neox": {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 8},
    "gpt2": {"n_embd": 128, "n_head": 8, "n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {
        "hidden_size": 128, "ffn_dim": 512, "num_attention_heads": 8, "word_embed_proj_dim": 128, "dropout": 0.0,
        "max_position_embeddings": 128,
    },
    "cohere": ROTARY,
    "granite": ROTARY,
    "stablelm": {**MULTI_HEAD, "attention_dropout": 0.0},
    "starcoder2": {**ROTARY, "residual_dropout": 0.0, "embedding_dropout": 0.0, "sliding_window": None},
}  # fmt: skip
LAYERS_KEY = {"gpt2": "n_layer"}


def saved_bytes(kind: str, config: dict[str, Any], *, layers: int) -> int:
    spec = ModelSpec(type=kind, config={**config, LAYERS_KEY.get(kind, "num_hidden_layers"): layers})
    model = build_skeleton(build_config(spec, vocab_size=64))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # an address must not be used twice while counting

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    ids = torch.randint(0, 64, (ROWS, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, use_cache=False)
    return sum(kept.values())


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_block_keeps_what_the_formula_says(kind: str) -> None:
    config = FAMILIES[kind]
    measured = saved_bytes(kind, config, layers=3) - saved_bytes(kind, config, layers=2)
    shape = zoo.shape_from_type(kind, {**config, LAYERS_KEY.get(kind, "num_hidden_layers"): 3})
    block = shape.kinds[0]
    attention = block.attention
    assert attention is not None
    kept = kept_by(block, compute_bytes=2, writes_scores=attention.materialises_scores, hidden_size=shape.hidden_size)
    per_token = kept.stream + kept.gathered + kept.split + kept.key_value + kept.scores * LENGTH
    assert per_token * ROWS * LENGTH == pytest.approx(measured, rel=0.02)
