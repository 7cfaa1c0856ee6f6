"""MLPs in chunks of positions: the numbers of whole rows to rounding, inner activations of one chunk at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import CPU, FAMILIES, build_engine, global_batch
from torch import nn

from weft.core.errors import ModelError, NotBuiltError
from weft.core.executable import not_executed_reasons
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.activations.dropout import part_of_rows, seeded_forward
from weft.engine.activations.slices import EvenSlice, PositionChunk, place, take
from weft.engine.engine import Engine
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe
from weft.models.mlps import find_mlps, why_not_chunked

Tables = dict[str, Any]
LENGTH, CHUNK = 16, 5  # the last chunk has one position
ROTARY = dict(FAMILIES["qwen3-tied"].config)
MODELS = {
    "llama": ModelSpec(type="llama", config={**FAMILIES["llama"].config, "num_hidden_layers": 2}),
    "gpt2": FAMILIES["gpt2"],  # drops 0.1 in the MLP
    "gemma3_text": ModelSpec(type="gemma3_text", config={**ROTARY, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "phi3": ModelSpec(type="phi3", config={**FAMILIES["llama"].config, "num_hidden_layers": 2, "pad_token_id": 0}),
}
FULL, BF16 = {"activations": {"policy": "full"}}, {"precision": {"preset": "bf16"}}


def engine_of(family: str, tables: Tables, *, chunk: int = 0) -> Engine:
    activations = {**tables.get("activations", {}), "sequence_chunk": chunk}
    return build_engine(MODELS[family], {"pipeline": {"microbatches": 2}, **tables, "activations": activations})


def trained(engine: Engine) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the last gradients of two steps."""
    found: dict[str, torch.Tensor] = {}
    engine.on_gradients = lambda named: found.update({name: value.detach().clone() for name, value in named.items()})
    return [engine.step(global_batch(step, rows=4, length=LENGTH)).loss for step in range(2)], found


@pytest.mark.parametrize(
    ("family", "tables"),
    [
        *((family, {}) for family in MODELS),
        ("gpt2", FULL),
        ("llama", {**FULL, "data_parallel": {"zero": 3}}),
        ("gpt2", {"activations": {"policy": "full", "offload": "cpu"}}),
    ],
)
def test_chunks_have_the_gradients_of_whole_rows(family: str, tables: Tables) -> None:
    losses, gradients = trained(engine_of(family, tables))
    found, chunked = trained(engine_of(family, tables, chunk=CHUNK))
    assert found == pytest.approx(losses, abs=1e-6)
    for name, value in gradients.items():
        torch.testing.assert_close(chunked[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("tables", [BF16, {**BF16, **FULL}])
def test_a_chunk_computes_again_with_the_casts_of_its_block(tables: Tables) -> None:
    """The masters are back in their places when a backward begins."""
    losses, gradients = trained(engine_of("gpt2", tables))
    found, chunked = trained(engine_of("gpt2", tables, chunk=CHUNK))
    assert found == pytest.approx(losses, abs=1e-3)
    for name, value in gradients.items():
        assert (chunked[name] - value).norm() < 0.01 * value.norm() + 1e-4, name


@pytest.mark.parametrize("policy", ["none", "full"])
def test_saved_inside_an_mlp_is_of_one_chunk(policy: str) -> None:
    """The largest tensor that autograd saves within an MLP, and the number of its forwards."""
    engine = engine_of("llama", {"activations": {"policy": policy}}, chunk=CHUNK)
    lengths: list[int] = []
    mlp = engine.model.get_submodule("model.layers.0.mlp")
    mlp.act_fn.register_forward_hook(lambda _module, _args, output: lengths.append(output.shape[1]))
    kept: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.step(global_batch(0, rows=4, length=LENGTH))
    width, chunks = ROTARY["intermediate_size"], -(-LENGTH // CHUNK)
    assert max(lengths) == CHUNK
    of_two = {"none": 2 * chunks, "full": 3 * chunks - 1}[policy]  # nothing is saved after the last chunk of a block
    assert len(lengths) == 2 * of_two
    assert not any(len(shape) == 3 and shape[-1] == width for shape in kept)


def test_an_evaluation_runs_in_chunks_too() -> None:
    engine = engine_of("llama", {}, chunk=CHUNK)
    lengths: list[int] = []
    mlp = engine.model.get_submodule("model.layers.0.mlp")
    mlp.act_fn.register_forward_hook(lambda _module, _args, output: lengths.append(output.shape[1]))
    with torch.no_grad():
        engine.model(input_ids=global_batch(0, rows=2, length=LENGTH)["input_ids"])
    assert lengths == [5, 5, 5, 1]


def test_dropout_of_a_chunk_is_its_part_of_the_row() -> None:
    def drawn(first: int, size: int) -> torch.Tensor:
        with (
            seeded_forward(seed=1, step=0, first_row=3, num_rows=2, is_random=True),
            part_of_rows(PositionChunk(first, size, 7)),
        ):
            return nn.functional.dropout(torch.ones(2, size, 6), 0.5)

    with seeded_forward(seed=1, step=0, first_row=3, num_rows=2, is_random=True):
        whole = nn.functional.dropout(torch.ones(2, 7, 6), 0.5)
    torch.testing.assert_close(torch.cat([drawn(0, 3), drawn(3, 3), drawn(6, 1)], 1), whole, rtol=0, atol=0)


def test_a_gathered_chunk_has_positions_of_each_rank_in_turn() -> None:
    full = torch.arange(16).reshape(1, 16)
    part = PositionChunk(3, 2, 8)  # of two ranks with 8 positions each
    own = take(full, [(1, part)])
    assert own.tolist() == [[3, 4, 11, 12]]
    placed = place(own, [(1, part)], fill=-1)
    assert placed.shape == full.shape
    assert take(placed, [(1, part)]).tolist() == own.tolist()
    assert EvenSlice(0, 2).take(placed, 1).tolist() == [[-1, -1, -1, 3, 4, -1, -1, -1]]


def test_a_mixture_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model\.layers\.0 is a mixture of experts") as caught:
        build_engine("mixtral", {"activations": {"sequence_chunk": 4}})
    assert caught.value.hint == "set activations.sequence_chunk = 0"


def test_projections_without_a_module_of_their_own_are_refused() -> None:
    """OPT's fc1 and fc2 are children of the block."""
    small = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = build_skeleton(build_config(ModelSpec(type="opt", config=small), vocab_size=64))
    assert "no module that holds its feed-forward layer alone" in why_not_chunked(
        model, find_mlps(model, describe(model))
    )


def test_an_mlp_that_mixes_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    own = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, x + x.roll(1, 1)))
    config = build_config(ModelSpec(type="llama", config={**ROTARY, "intermediate_size": 40}), vocab_size=64)
    model = build_skeleton(config)
    assert "several positions" in why_not_chunked(model, find_mlps(model, describe(model)))


def test_a_model_of_ones_own_is_refused() -> None:
    with pytest.raises(NotBuiltError, match="needs a Hugging Face model") as caught:
        Engine(nn.Linear(2, 2), Plan.from_tables({"activations": {"sequence_chunk": 4}}), device=CPU)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"activations": {"policy": "selective"}}, "'selective'"),
        ({"activations": {"policy": "budget", "mixture": [1, 1]}}, "'budget'"),
        ({"mesh": {"tp": 2}}, "tensor parallelism"),
        ({"mesh": {"dp_shard": 2, "ep": 2}}, "expert parallelism"),
        ({"float8": {"linears": "all"}, "precision": {"preset": "bf16"}}, "float8 products"),
        ({"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble", "microbatches": 4}}, "splits the backward"),
        ({"activations": {"offload": "cpu", "offload_blocks": 1}}, "offload_blocks"),
    ],
)
def test_other_features_are_refused_by_name(tables: Tables, words: str) -> None:
    activations = {**tables.get("activations", {}), "sequence_chunk": 4}
    found = list(not_executed_reasons(Plan.from_tables({**tables, "activations": activations})))
    assert any(words in sentence and hint == "set activations.sequence_chunk = 0" for sentence, hint in found)


def test_compiled_blocks_have_no_chunks() -> None:
    plan = Plan.from_tables({"compile": {"enabled": True}, "activations": {"sequence_chunk": 4}})
    assert [hint for _, hint in not_executed_reasons(plan)] == ["set compile.enabled = false"]
