"""The activation formulas against autograd itself: the bytes that a block of each family saves, in bfloat16.

saved(3 blocks) - saved(2 blocks) is one block's; storages are counted once, parameters and shared tables not at all.
With recompute, live bytes after one more block are counted: not all of them are autograd's.
"""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.core.memory_sections import Activations
from weft.core.run_spec import ModelSpec
from weft.engine.activations.recompute import apply_recompute
from weft.engine.buffers.changes import BufferChanges
from weft.engine.kernels.cpu_matmul import patch_low_precision_matmul
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe
from weft.models.shape.lookup import shape_from_type
from weft.plan.memory.block_activations import SavedBytes, saved_by_default, saved_by_full, saved_by_selective

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


def built(kind: str, config: dict[str, Any], *, layers: int) -> nn.Module:
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
    patch_low_precision_matmul(torch.bfloat16)
    return model


def saved_bytes(kind: str, config: dict[str, Any], *, layers: int) -> int:
    model = built(kind, config, layers=layers)
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


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that operators gave and nobody dropped."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {}
        self.references: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.references.append(weakref.ref(storage, lambda _: self.sizes.pop(key, None)))


def alive_bytes_of_a_block(kind: str, config: dict[str, Any], policy: Any) -> int:
    return alive_bytes_of_blocks(kind, config, Activations(policy=policy), layers=3)[2]


def alive_bytes_of_blocks(kind: str, config: dict[str, Any], activations: Activations, *, layers: int) -> list[int]:
    """What is alive after each block more than after the one before; of the first, with what comes before it."""
    model = built(kind, config, layers=layers)
    layout = describe(model)
    apply_recompute(model, layout, activations, BufferChanges(model))
    marks = [0]
    with LiveBytes() as live:  # type: ignore[no-untyped-call]
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.detach()  # views of weights are no block's
        for name in layout.blocks:
            model.get_submodule(name).register_forward_hook(lambda *_: marks.append(sum(live.sizes.values())))
        outputs = model(input_ids=torch.randint(0, 64, (ROWS, LENGTH)), use_cache=False)
    del outputs
    return [after - before for before, after in pairwise(marks)]


def bytes_kept(kept: SavedBytes) -> float:
    per_token = kept.stream + kept.gathered + kept.split + kept.key_value + kept.scores * LENGTH + kept.routed
    return per_token * ROWS * LENGTH


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_block_keeps_what_the_formula_says(kind: str) -> None:
    config = FAMILIES[kind]
    measured = saved_bytes(kind, config, layers=3) - saved_bytes(kind, config, layers=2)
    shape = shape_from_type(kind, {**config, LAYERS_KEY.get(kind, "num_hidden_layers"): 3})
    block = shape.kinds[0]
    attention = block.attention
    assert attention is not None
    kept = saved_by_default(
        block, compute_bytes=2, writes_scores=attention.materialises_scores, hidden_size=shape.hidden_size
    )
    assert bytes_kept(kept) == pytest.approx(measured, rel=0.02)


RECOMPUTED = {**FAMILIES, "mixtral": {**ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2}}


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_a_recomputed_block_keeps_what_the_formula_says(kind: str) -> None:
    config = RECOMPUTED[kind]
    shape = shape_from_type(kind, {**config, LAYERS_KEY.get(kind, "num_hidden_layers"): 3})
    block, hidden = shape.kinds[0], shape.hidden_size
    assert block.attention is not None
    writes_scores = block.attention.materialises_scores
    partly = saved_by_selective(block, compute_bytes=2, writes_scores=writes_scores, hidden_size=hidden)
    assert bytes_kept(partly) == alive_bytes_of_a_block(kind, config, "selective")
    assert bytes_kept(saved_by_full(compute_bytes=2, hidden_size=hidden)) == alive_bytes_of_a_block(
        kind, config, "full"
    )


def test_blocks_of_a_budget_save_what_their_own_formulas_say() -> None:
    """Of three: full, selective, none. Together: what a block keeps of its output counts with the next one."""
    config = RECOMPUTED["llama"]
    shape = shape_from_type("llama", {**config, "num_hidden_layers": 3})
    block, hidden = shape.kinds[0], shape.hidden_size
    mixed, whole = (
        sum(alive_bytes_of_blocks("llama", config, activations, layers=3))
        for activations in (Activations(policy="budget", mixture=(1, 1)), Activations())
    )
    everything, partly = (
        kept(block, compute_bytes=2, writes_scores=False, hidden_size=hidden)
        for kept in (saved_by_default, saved_by_selective)
    )
    input_only = saved_by_full(compute_bytes=2, hidden_size=hidden)
    stream = 2 * ROWS * LENGTH * hidden  # one that the model's own code still holds is not bought by keeping an input
    assert whole - mixed == pytest.approx(
        bytes_kept(everything - partly) + bytes_kept(everything - input_only), abs=stream, rel=0
    )
