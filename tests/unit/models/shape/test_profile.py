"""Profiles of blocks: components of saved activations against the arithmetic of the operators that save them."""

from typing import Any

import pytest

from weft.core.model_shape import BlockShape, SavedBytes
from weft.models.shape.lookup import shape_from_type

H, F, HEADS, KV_HEADS, DIM = 64, 160, 8, 2, 8
SIZES: dict[str, Any] = {
    "hidden_size": H, "intermediate_size": F, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": DIM, "vocab_size": 96, "max_position_embeddings": 128,
}  # fmt: skip


def saved(block: BlockShape, *, c: int = 2, scores: bool = False) -> SavedBytes:
    return next(one.saved for one in block.profiles if (one.compute_bytes, one.writes_scores) == (c, scores))


def test_llama_by_hand() -> None:
    (block,) = shape_from_type("llama", SIZES).kinds
    c = 2
    assert saved(block) == SavedBytes(
        stream=2 * ((4 + c) * H + 4),  # two RMSNorms: input in float32, normalised input, one statistic
        gathered=2 * c * H,  # inputs of attention and MLP
        split=2 * c * HEADS * DIM + 4 * HEADS + 4 * c * F,  # q, output, sums; gate, act(gate), up, product
        key_value=2 * c * KV_HEADS * DIM,
    )


def test_written_scores_by_hand() -> None:
    """A float32 softmax and its cast for every head and key; keys and values repeated for each query head."""
    (block,) = shape_from_type("llama", SIZES).kinds
    c, fused, written = 2, saved(block), saved(block, scores=True)
    assert written.scores == HEADS * (4 + c)
    assert written.split - fused.split == 2 * c * HEADS * DIM - 4 * HEADS
    assert (written.key_value, saved(block, c=4, scores=True).scores) == (0, HEADS * 4)


def test_experts_route_their_tokens() -> None:
    """Two of four experts per token: inputs and outputs are of full width, the rest of the expert's width."""
    (block,) = shape_from_type("mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}).kinds
    attention = 2 * 2 * HEADS * DIM + 4 * HEADS
    assert saved(block).routed == 2 * 2 * 2 * H
    assert saved(block).split == attention + 2 * 4 * 2 * F
    assert block.moe is not None
    assert block.moe.weighs_in_float32
    assert (block.moe.num_weights, block.moe.num_choices) == (1, 1)


def test_llama4_weighs_tokens_before_its_experts() -> None:
    sizes = SIZES | {"intermediate_size_mlp": F, "num_local_experts": 4, "interleave_moe_layer_step": 1}
    block = shape_from_type("llama4_text", sizes).kinds[0]
    assert block.moe is not None
    assert (block.moe.num_weights, block.moe.num_choices) == (0, 0)


@pytest.mark.parametrize(
    ("model_type", "is_parallel", "saves_after_exit", "materialises"),
    [
        ("llama", False, False, False),
        ("gpt_neox", True, False, False),
        ("gemma2", False, True, True),
        ("olmo2", False, True, False),
        ("bloom", False, False, True),
    ],
)
def test_facts_of_a_forward(model_type: str, is_parallel: bool, saves_after_exit: bool, materialises: bool) -> None:
    sizes = {"hidden_size": 64, "n_layer": 2, "n_head": 8, "vocab_size": 96} if model_type == "bloom" else SIZES
    block = shape_from_type(model_type, sizes).kinds[0]
    assert block.attention is not None
    found = (block.is_parallel, block.saves_after_exit, block.attention.materialises_scores)
    assert found == (is_parallel, saves_after_exit, materialises)


def test_a_parallel_block_gathers_its_input_twice_with_sequence_parallel() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 96}
    (block,) = shape_from_type("falcon", sizes | {"parallel_attn": True, "multi_query": True}).kinds
    assert saved(block).copied == saved(block).gathered == 2 * 64


def test_a_state_space_block_is_profiled() -> None:
    """Its scan is the model's own code: every tensor of it is counted, none is divided by tensor parallelism."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 16, "head_dim": 8, "state_size": 16}
    block = shape_from_type("mamba2", sizes | {"vocab_size": 96, "n_groups": 1}).kinds[0]
    found = saved(block)
    assert found.gathered > 10 * 64
    assert (found.split, found.key_value, found.scores) == (0, 0, 0)


def test_calls_of_attention_and_their_heads_are_those_of_the_forward() -> None:
    """Differential attention calls twice; deepseek_v4 has one key-value head, whatever its config says."""
    (twice,) = shape_from_type("diffllama", SIZES).kinds
    assert twice.attention is not None
    assert (twice.attention.calls, twice.attention.num_kv_heads) == (2, KV_HEADS)
    sizes = SIZES | {"n_routed_experts": 4, "moe_intermediate_size": 32, "q_lora_rank": 16, "num_key_value_heads": 8}
    (one,) = shape_from_type("deepseek_v4", sizes | {"layer_types": ["sliding_attention"] * 2, "o_groups": 2}).kinds
    assert one.attention is not None
    assert (one.attention.calls, one.attention.num_kv_heads) == (1, 1)
