"""Bytes autograd keeps of a block, against the arithmetic of the operators that keep them."""

from dataclasses import replace

import numpy as np
import pytest
from plan_cases import columns_with, one, plan_with, request_of, tiny_llama, tiny_mixtral

from weft import zoo
from weft.core.model_shape import BlockShape
from weft.plan.arithmetic import explain_memory
from weft.plan.memory.block_activations import (
    SavedBytes,
    bytes_of,
    mean_keys,
    saved_by_compiled,
    saved_by_default,
    saved_by_full,
    saved_by_selective,
)

H, F, HEADS, KV_HEADS, DIM = 4096, 14_336, 32, 8, 128  # Llama-3 8B
LLAMA = zoo.named("llama-3-8b").kinds[0]
STATISTICS = 2 * 4  # one float32 a token of each RMSNorm


def a_token(kept: SavedBytes, block: BlockShape = LLAMA, *, keys: float = 0.0, **plan: object) -> float:
    return one(bytes_of(kept, block, columns_with(plan), tokens=np.asarray([1.0]), keys=np.asarray([keys])))


def everything(block: BlockShape = LLAMA, *, c: int = 2, scores: bool = False, h: int = H) -> SavedBytes:
    return saved_by_default(block, compute_bytes=c, writes_scores=scores, hidden_size=h)


def test_one_layer_of_llama_3_8b_keeps_200_832_bytes_a_token() -> None:
    """2(4+c)h + 2ch + 2c(ad + kd) + 4a + 4cf, counted on fake tensors; the norms' statistics come on top."""
    by_hand = 2 * 6 * H + 2 * 2 * H + 4 * (HEADS + KV_HEADS) * DIM + 4 * HEADS + 8 * F
    assert by_hand == 200_832
    assert a_token(everything()) == by_hand + STATISTICS


def test_the_same_layer_in_float32() -> None:
    by_hand = 2 * 8 * H + 2 * 4 * H + 8 * (HEADS + KV_HEADS) * DIM + 4 * HEADS + 16 * F
    assert a_token(everything(c=4)) == by_hand + STATISTICS


def test_full_recomputation_keeps_the_input() -> None:
    assert a_token(saved_by_full(compute_bytes=2, hidden_size=H)) == 2 * H


def test_selective_recomputation_keeps_products_and_attention() -> None:
    """c(3h + 2ad + 2kd + 2f) + 4a: input, o_proj and down_proj; q, attention, k, v; gate and up."""
    by_hand = 2 * (3 * H + 2 * HEADS * DIM + 2 * KV_HEADS * DIM + 2 * F) + 4 * HEADS
    assert a_token(saved_by_selective(LLAMA, compute_bytes=2, writes_scores=False, hidden_size=H)) == by_hand
    assert a_token(saved_by_full(compute_bytes=2, hidden_size=H)) < by_hand < a_token(everything())


def test_selective_recomputation_does_not_keep_written_out_attention() -> None:
    fused, written = (
        saved_by_selective(LLAMA, compute_bytes=2, writes_scores=scores, hidden_size=H) for scores in (False, True)
    )
    assert written.scores == 0
    assert a_token(fused) - a_token(written) == 2 * HEADS * DIM + 4 * HEADS


def test_tensor_parallelism_cuts_the_inside_and_sequence_parallelism_the_stream() -> None:
    """The gathered inputs of attention and MLP (2ch) stay whole; norms are cut only with sequence parallelism."""
    inside = 4 * (HEADS + KV_HEADS) * DIM + 4 * HEADS + 8 * F
    norms, gathered = 2 * 6 * H + STATISTICS, 2 * 2 * H
    plain = a_token(everything(), tp=8, sequence_parallel=False)
    assert plain == pytest.approx(norms + gathered + inside / 8)
    assert a_token(everything(), tp=8, sequence_parallel=True) == pytest.approx(norms / 8 + gathered + inside / 8)


def test_keys_and_values_are_cut_only_as_far_as_there_are_heads() -> None:
    """16 ranks on 8 key-value heads: two ranks keep the same head."""
    kept = everything()
    assert kept.key_value == 2 * 2 * KV_HEADS * DIM
    alone = SavedBytes(key_value=kept.key_value)
    assert a_token(alone, tp=16) == a_token(alone, tp=8) == kept.key_value / 8


@pytest.mark.parametrize("mode", ["2d", "2.5d", "3d"])
def test_beyond_one_dimension_every_activation_is_cut(mode: str) -> None:
    tp = {"2d": 4, "2.5d": 8, "3d": 8}[mode]
    assert a_token(everything(), tp=tp, mode=mode, sequence_parallel=False) == pytest.approx(a_token(everything()) / tp)


def test_written_out_attention_keeps_probabilities_and_repeated_keys() -> None:
    """A float32 softmax and its bf16 cast for every head and key; k and v for each of the 32 query heads."""
    fused, written = everything(), everything(scores=True)
    assert written.scores == HEADS * (4 + 2)
    assert a_token(written, keys=1000) - a_token(written) == HEADS * 6 * 1000
    repeated = 2 * 2 * HEADS * DIM
    assert a_token(written) - a_token(fused) == repeated - 2 * 2 * KV_HEADS * DIM - 4 * HEADS
    assert everything(c=4, scores=True).scores == HEADS * 4  # float32 needs no cast


def test_layer_norm_keeps_its_input_once() -> None:
    """GPT-2: two LayerNorms (2ch + 16), qkv and attention (4ch + 4a), two linear inputs (2ch), gelu_new's 5 x 4h."""
    gpt2 = zoo.named("gpt2").kinds[0]
    h, heads, c = 768, 12, 2
    by_hand = 2 * (c * h + 8) + c * h + 4 * c * h + 4 * heads + c * h + c * 5 * 4 * h + 2 * h
    assert gpt2.dropout > 0  # two masks of a byte: the last term
    assert a_token(everything(gpt2, h=h), gpt2) == by_hand


def test_an_activation_function_that_keeps_only_its_output() -> None:
    opt = zoo.named("opt-125m").kinds[0]
    silu_like = everything(zoo.named("gpt2").kinds[0], h=768)
    assert everything(opt, h=768).split < silu_like.split


def test_experts_keep_their_tokens_copies() -> None:
    """2 of 8 experts a token: in and out (2h) and four tensors of the expert's width, twice; 8 router logits."""
    block = tiny_mixtral().kinds[0]
    kept = everything(block, h=128)
    assert kept.routed == 2 * 2 * 2 * 128
    dense = everything(tiny_llama(hidden_size=128, intermediate_size=256).kinds[0], h=128)
    assert kept.split == dense.split + 2 * 4 * 256  # one expert's is the dense block's
    # the router is outside the experts' region: its input and its logits belong to the stream
    assert kept.gathered == dense.gathered / 2 + 4 * 2 + 8 * 6
    assert kept.stream > dense.stream + 2 * 128


@pytest.mark.parametrize(
    ("dp_shard", "tp", "ep", "copies"),
    [(8, 1, 1, 1), (8, 1, 8, 1), (2, 4, 1, 4), (2, 4, 2, 1), (2, 4, 8, 1), (1, 8, 8, 1)],
)
def test_every_rank_that_cuts_an_expert_has_all_of_its_tokens(dp_shard: int, tp: int, ep: int, copies: int) -> None:
    """Experts that are dealt out take the group's tokens once; experts that are cut take them on every rank."""
    block = tiny_mixtral().kinds[0]
    routed = SavedBytes(routed=1000.0)
    zero = 1 if dp_shard > 1 else 0
    assert tp * a_token(routed, block, dp_shard=dp_shard, tp=tp, ep=ep, zero=zero) == pytest.approx(1000 * copies)


def test_a_replicated_block_keeps_the_same_on_every_tensor_rank() -> None:
    block = zoo.named("mamba-130m").kinds[0]
    kept = everything(block, h=768)
    assert kept.split == kept.key_value == kept.scores == 0
    assert a_token(kept, block, tp=8, sequence_parallel=False) == a_token(kept, block, tp=1)


def test_a_parallel_block_gathers_its_shared_input_twice_with_sequence_parallel() -> None:
    """Falcon's attention and MLP read one normalised tensor: a view each without sequence parallel, a copy with it."""
    block = zoo.named("falcon-7b").kinds[0]
    kept = everything(block, h=4544)
    assert kept.copied == 2 * 4544
    with_it, without = (a_token(replace(kept, stream=0), block, tp=8, sequence_parallel=on) for on in (True, False))
    assert with_it - without == 2 * 4544


@pytest.mark.parametrize(("window", "keys"), [(None, 4.5), (8, 4.5), (100, 4.5), (1, 1.0), (2, (1 + 2 * 7) / 8)])
def test_keys_seen_under_a_causal_mask(window: int | None, keys: float) -> None:
    """8 queries see 1 … 8 keys; with a window of 2: 1, 2, 2, …"""
    assert LLAMA.attention is not None
    assert mean_keys(replace(LLAMA.attention, window=window), 8) == pytest.approx(keys)


@pytest.mark.parametrize(
    "name", ["llama-3-8b", "gpt2", "gemma-2-9b", "mixtral-8x7b", "deepseek-v3", "falcon-7b", "phi-2"]
)
@pytest.mark.parametrize("c", [2, 4])
def test_every_part_of_every_block_is_non_negative(name: str, c: int) -> None:
    shape = zoo.named(name)
    for block in shape.kinds:
        for kept in (
            everything(block, c=c, h=shape.hidden_size),
            everything(block, c=c, scores=True, h=shape.hidden_size),
        ):
            assert min(vars(kept).values()) >= 0
            assert a_token(kept, block) > a_token(saved_by_full(compute_bytes=c, hidden_size=shape.hidden_size), block)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llama-3-8b", SavedBytes(gathered=-2.0 * H)),  # what the MLP gives is added, and read by nothing
        # norms read what both parts give; scores, attention's output, keys and values for the 8 heads that share them
        ("gemma-2-9b", SavedBytes(scores=2.0 * 16, split=2.0 * (16 * 256 + 8 * 2 * 256))),
        ("mixtral-8x7b", SavedBytes(routed=2.0 * 2 * H)),  # the experts' inputs, and their outputs are weighed
        (
            "phi-3-mini",
            SavedBytes(gathered=-2.0 * 3072, split=2.0 * 3072, key_value=2.0 * 3072),
        ),  # rotated queries and keys
        (
            "gpt-neox-20b",
            SavedBytes(gathered=-4.0 * 6144, split=2.0 * 6144, key_value=2.0 * 6144),
        ),  # both parts are added
    ],
)
def test_a_compiled_block_keeps_what_its_backward_reads(model: str, more: SavedBytes) -> None:
    (block, *_) = zoo.named(model).kinds
    given = {"compute_bytes": 2, "writes_scores": more.scores > 0, "hidden_size": zoo.named(model).hidden_size}
    assert saved_by_compiled(block, **given) - saved_by_selective(block, **given) == more


def test_what_is_explained_of_compiled_blocks_is_what_they_keep() -> None:
    request = request_of("llama-3-8b", "8xH200", global_batch=8, sequence_length=4096)
    of_blocks = {}
    for enabled in (False, True):
        plan = plan_with(dp_shard=8, zero=3, enabled=enabled)
        _, lines = explain_memory(request, plan)
        of_blocks[enabled] = sum(line.bytes for line in lines if "dense blocks" in line.formula)
    assert of_blocks[True] < 0.6 * of_blocks[False]
