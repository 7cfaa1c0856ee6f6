"""Whole models on grids against one process: the loss, and every parameter's gradient, chunk by chunk."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from tensor_grids import whole_grid
from tiny import global_batch
from torch import nn
from transformers import AutoModelForCausalLM

from weft.core.plan import TensorParallel
from weft.core.run_spec import ModelSpec
from weft.engine.activations.dropout import seeded_forward
from weft.engine.objective import CausalLanguageModel
from weft.engine.tp.gradients import sum_partial_gradients
from weft.engine.tp.grid import Grid
from weft.engine.tp_grid.apply import apply_grid
from weft.models.build import build_config
from weft.models.layout import describe
from weft.models.tp.finder import find_tensor_layout

_ROTARY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "llama": ModelSpec(type="llama", config=_ROTARY),
    "qwen3": ModelSpec(type="qwen3", config={**_ROTARY, "head_dim": 8, "tie_word_embeddings": True}),
    "phi3": ModelSpec(type="phi3", config={**_ROTARY, "pad_token_id": 3, "resid_pdrop": 0.0}),
    "gpt_neox": ModelSpec(
        type="gpt_neox",
        config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "gemma3": ModelSpec(type="gemma3_text", config={**_ROTARY, "head_dim": 8}),
    "olmo2": ModelSpec(type="olmo2", config=_ROTARY),
    "gpt2-dropout": ModelSpec(type="gpt2", config={"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt2": ModelSpec(
        type="gpt2",
        config={
            "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
    ),
}  # fmt: skip
ROWS = 8
VOCABULARY = 257  # does not divide
# transformers' norms compute in float32 whatever the model's dtype; so does the loss
LOSS_REL, GRADIENT_REL = 1e-6, 2e-5


DEGREES = {"2d": 4, "2.5d": 8, "3d": 8}  # of eight ranks: two squares side by side, or one grid


def on_grids(rank: int, world: int, families: tuple[str, ...]) -> None:
    for mode in DEGREES:
        for family in families:
            compare(mode, family)


def options(rank: int, world: int) -> None:
    restarting = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]).repeat(4, 1)
    for mode in DEGREES:
        compare(mode, "gemma3")
        compare(mode, "olmo2")
        compare(mode, "llama", loss_parallel=False)
        compare(mode, "llama", position_ids=restarting)
    compare("2d", "gpt2", position_ids=restarting)
    for mode in ("2d", "2.5d"):
        compare(mode, "gpt2-dropout", is_random=True)


def real_model(family: str) -> nn.Module:
    """A model with values: every parameter random, biases and norms too, or their gradients would prove little."""
    spec = FAMILIES[family]
    spec = ModelSpec(type=spec.type, config={**spec.config, "vocab_size": VOCABULARY})
    config = build_config(spec, vocab_size=VOCABULARY)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    assert model.get_input_embeddings().weight.shape[0] == VOCABULARY
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator, std=0.2)
    return model


def batch() -> dict[str, torch.Tensor]:
    return global_batch(0, rows=ROWS, length=6)


def compare(
    mode: str, family: str, *, loss_parallel: bool = True, is_random: bool = False, **inputs: torch.Tensor
) -> None:
    whole = real_model(family)
    model = copy.deepcopy(whole)
    with seeded_forward(seed=1, step=2, first_row=0, num_rows=ROWS, is_random=is_random):
        expected = CausalLanguageModel().loss_sum(whole, {**batch(), **inputs})
    expected.backward()

    grid = whole_grid(mode, DEGREES[mode])
    layout = describe(model)
    policy = TensorParallel(mode=mode, loss_parallel=loss_parallel)
    face = apply_grid(model, layout, find_tensor_layout(model, layout), policy, grid=grid, keep_logits_full=False)
    objective = CausalLanguageModel(face.token_loss)
    rows = ROWS // face.row_chunks
    first_row, slices = face.row_chunk * rows, face.activation_layout
    with seeded_forward(seed=1, step=2, first_row=first_row, num_rows=rows, is_random=is_random, slices=slices):
        found = objective.loss_sum(model, face.rows_of({**batch(), **inputs}))
    found.backward()
    total = found.detach() * face.owns_loss
    dist.all_reduce(total, group=grid.group("tp"))
    assert total.item() == pytest.approx(expected.item(), rel=LOSS_REL), family

    gradients = dict(model.named_parameters())
    sum_partial_gradients(gradients, face.shards, grid)
    largest = max(parameter.grad.abs().max() for parameter in whole.parameters() if parameter.grad is not None)
    for name, parameter in whole.named_parameters():
        assert_same(f"{family}.{name}", gradients[name], parameter, face.shards[name], atol=GRADIENT_REL * largest)
    assert held_once(face.shards, grid) == sum(parameter.numel() for parameter in whole.parameters())


def assert_same(name: str, own: nn.Parameter, whole: nn.Parameter, shard: Any, *, atol: torch.Tensor) -> None:
    assert own.grad is not None
    assert whole.grad is not None
    assert tuple(own.shape) == shard.local_shape
    for chunk in shard.chunks:
        difference = (own.grad[chunk.local_index] - whole.grad[chunk.global_index]).abs().max()
        assert difference <= atol, f"{name}: {difference} > {atol}"


def held_once(shards: dict[str, Any], grid: Grid) -> int:
    """Elements of all ranks, each divided by those that hold the same: every element of the model, once."""
    own = torch.tensor([sum(chunk.num_elements / chunk.copies for shard in shards.values() for chunk in shard.chunks)])
    dist.all_reduce(own, group=grid.group("tp"))
    return round(own.item())


def test_grids_compute_what_one_process_does() -> None:
    run_ranks(on_grids, 8, ("phi3", "gpt2"), timeout_s=300)


@pytest.mark.slow
def test_more_families_on_grids() -> None:
    run_ranks(on_grids, 8, ("llama", "qwen3", "gpt_neox"), timeout_s=300)
    run_ranks(options, 8, timeout_s=300)
