"""Elements a rank holds: every zoo model whole on one rank, uneven shards, tensor cuts, experts, ends of pipelines."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import columns_with, one, request_of, tiny_llama, tiny_mixtral, view_with

from weft import zoo
from weft.core.model_shape import BlockShape, ExtraShape, LinearShape
from weft.core.shards import even_span, zero_dim
from weft.plan.memory.parameters import Share, block_elements, linear_elements

LLAMA_8B = 8_030_261_248
MATRIX = LinearShape(name="m", in_features=10, out_features=9, style="column")


def share(model: object, place: int = 0, **keys: object) -> Share:
    return view_with(request_of(model), place, **keys).share  # type: ignore[arg-type]


@pytest.mark.parametrize("name", zoo.names())
def test_a_rank_alone_holds_the_whole_model(name: str) -> None:
    shape = zoo.named(name)
    held = share(shape)
    assert one(held.total.unsharded) == shape.num_parameters
    assert one(held.total.shard) == shape.num_parameters


def test_llama_3_8b_in_eight_shards() -> None:
    """Every dimension 0 divides by 8, so the shard is an eighth to the parameter."""
    held = share("llama-3-8b", dp_shard=8, zero=3)
    assert one(held.total.unsharded) == LLAMA_8B
    assert one(held.total.shard) == LLAMA_8B / 8
    assert one(held.total.padded) == LLAMA_8B


@pytest.mark.parametrize(("shards", "rows"), [(1, 9), (2, 5), (4, 3), (8, 2), (16, 1)])
def test_rows_that_do_not_divide_leave_the_first_rank_the_larger_share(shards: int, rows: int) -> None:
    """9 rows of 10: on 4 ranks 3, 3, 3, 0, and a gather moves 12 rows."""
    held = linear_elements(MATRIX, columns_with({"dp_shard": shards, "zero": min(shards - 1, 3)}))
    assert one(held.unsharded) == 90
    assert one(held.shard) == rows * 10
    assert one(held.padded) == rows * 10 * shards


def test_a_bias_is_cut_with_its_rows() -> None:
    biased = LinearShape(name="m", in_features=10, out_features=9, style="column", bias=True)
    held = linear_elements(biased, columns_with({"dp_shard": 4, "zero": 3}))
    assert one(held.unsharded) == 99
    assert one(held.shard) == 33


def test_replicas_do_not_shard() -> None:
    held = share("llama-3-8b", dp_replicate=8)
    assert one(held.total.shard) == LLAMA_8B
    hybrid = share("llama-3-8b", dp_replicate=4, dp_shard=2, zero=3)
    assert one(hybrid.total.shard) == LLAMA_8B / 2


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_cuts_matrices_and_tables_but_not_norms(tp: int) -> None:
    shape = zoo.named("llama-3-8b")
    norms = sum(norm.num_parameters for norm in shape.kinds[0].norms) * 32 + 4096
    assert one(share(shape, tp=tp).total.unsharded) == (LLAMA_8B - norms) / tp + norms


def test_a_row_parallel_matrix_is_cut_along_its_input() -> None:
    down = LinearShape(name="down", in_features=12, out_features=8, style="row")
    held = linear_elements(down, columns_with({"tp": 4, "dp_shard": 8, "zero": 3}))
    assert one(held.unsharded) == 8 * 3
    assert one(held.shard) == 1 * 3  # sharding still cuts the 8 rows


@pytest.mark.parametrize(("style", "held"), [("column", 3), ("replicated", 12)])
def test_other_parameters_are_cut_as_they_say(style: Any, held: int) -> None:
    block = BlockShape(kind="x", linears=(), extras=(ExtraShape(name="sinks", num_parameters=12, style=style),))
    assert one(block_elements(block, columns_with({"tp": 4})).unsharded) == held


def test_a_replicated_matrix_is_whole_on_every_tensor_rank() -> None:
    router = LinearShape(name="gate", in_features=12, out_features=8)
    assert one(linear_elements(router, columns_with({"tp": 4})).unsharded) == 96


@pytest.mark.parametrize(("ep", "experts"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_experts_are_dealt_over_ep(ep: int, experts: int) -> None:
    shape = tiny_mixtral()
    block = shape.kinds[0]
    others = block.num_parameters - block.expert_parameters
    held = block_elements(block, columns_with({"dp_shard": 8, "ep": ep, "zero": 1}))
    assert one(held.unsharded) == others + block.expert_parameters * experts / 8


def test_experts_on_the_ranks_that_share_them_are_sharded_among_those_only() -> None:
    """8 ranks, ep = 4: two ranks hold the same two experts, so a shard is one expert, and nothing else is an eighth."""
    block = tiny_mixtral().kinds[0]
    held = block_elements(block, columns_with({"dp_shard": 8, "ep": 4, "zero": 3}))
    others = (block.num_parameters - block.expert_parameters) / 8
    assert one(held.shard) == others + block.expert_parameters / 8


def test_mixtral_in_64_shards_is_a_64th() -> None:
    """8 experts on 64 ranks: their second dimensions, 28672 and 4096, divide. Only the routers' 8 rows are padded."""
    held = share("mixtral-8x7b", dp_shard=64, zero=3)
    routers = 32 * 8 * 4096
    assert one(held.total.shard) == (one(held.total.unsharded) - routers) / 64 + routers / 8
    assert one(held.total.shard) == pytest.approx(one(held.total.unsharded) / 64, rel=0.01)
    assert one(held.largest_inner) == 8 * 3 * 4096 * 14336


@pytest.mark.parametrize(
    ("shape", "style", "ranks", "expected"),
    [
        ((2, 8, 4), "column", {"dp_shard": 4}, (2, 2, 4)),
        ((7, 8, 4), "column", {"dp_shard": 4}, (7, 2, 4)),
        ((8, 6, 4), "column", {"dp_shard": 4}, (2, 6, 4)),
        ((2, 6, 4), "column", {"dp_shard": 4}, (1, 6, 4)),
        ((3, 8, 4), "column", {"dp_shard": 2, "tp": 2}, (3, 2, 4)),
        ((3, 8, 4), "column", {"dp_shard": 4, "tp": 4}, (1, 2, 4)),  # 2 of the 8 do not divide by 4
        ((3, 8, 4), "row", {"dp_shard": 4, "tp": 4}, (3, 2, 1)),
    ],
)
def test_experts_are_sharded_as_the_engine_shards_them(
    shape: tuple[int, ...], style: Any, ranks: dict[str, int], expected: tuple[int, ...]
) -> None:
    linear = LinearShape(
        name="up", copies=shape[0], out_features=shape[1], in_features=shape[2], style=style, role="expert"
    )
    held = linear_elements(linear, columns_with({**ranks, "zero": 3}))
    assert one(held.shard) == math.prod(expected)
    tp = ranks.get("tp", 1)
    of_rank = (shape[0], shape[1] // tp, shape[2]) if style == "column" else (*shape[:2], shape[2] // tp)
    dim = zero_dim(of_rank, num_shards=ranks["dp_shard"])
    span = even_span(of_rank[dim], degree=ranks["dp_shard"], place=0)
    assert one(held.shard) == math.prod(of_rank) // of_rank[dim] * span.size


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_all_ranks_together_hold_each_expert_once(ep: int, tp: int) -> None:
    block = tiny_mixtral().kinds[0]
    experts = [linear for linear in block.linears if linear.role == "expert"]
    columns = columns_with({"dp_shard": 8 // tp, "tp": tp, "ep": ep, "zero": 3 if tp < 8 else 0})
    held = sum(one(linear_elements(linear, columns).shard) for linear in experts)
    assert held * 8 == pytest.approx(block.expert_parameters)


def test_pipeline_ends_hold_the_tables() -> None:
    """405B on 16 stages: 7 blocks and the embedding, 8 blocks, 7 blocks, the head and the final norm."""
    shape = zoo.named("llama-3.1-405b")
    block, table = shape.kinds[0].num_parameters, 128_256 * 16_384
    first, middle, last = (share(shape, place, pp=16, microbatches=16) for place in (0, 1, 2))
    assert one(middle.total.unsharded) == 8 * block
    assert one(last.total.unsharded) == 7 * block + table + 16_384
    assert one(first.total.unsharded) - 7 * block - table in (0, 16_384)


def test_a_tied_head_is_a_second_copy_on_another_stage() -> None:
    shape = tiny_llama(tie_word_embeddings=True)
    table = 512 * 256
    assert one(share(shape).root.unsharded) == table + 256
    assert one(share(shape, 2, pp=2, microbatches=2).root.unsharded) == table + 256


@given(rows=st.integers(1, 5000), shards=st.integers(2, 512))
def test_shards_cover_the_matrix_and_no_rank_is_a_row_above_its_part(rows: int, shards: int) -> None:
    linear = LinearShape(name="m", in_features=1, out_features=rows)
    held = linear_elements(linear, columns_with({"dp_shard": shards, "zero": 3}))
    assert one(held.padded) >= rows
    assert rows / shards <= one(held.shard) < rows / shards + 1


def test_the_largest_block_is_one_the_rank_has() -> None:
    """DeepSeek-V3's first stage holds the dense blocks; a stage of one kind cannot report the other's size."""
    shape = zoo.named("deepseek-v3")
    sizes = {kind.num_parameters for kind in shape.kinds}
    assert one(share(shape).largest_block) == max(sizes)
    dense = min(sizes)
    first = share(shape, 0, pp=32, microbatches=32)  # 61 blocks on 32 stages: one or two a stage
    assert one(first.largest_block) == dense


def test_beyond_its_key_value_heads_tensor_parallelism_repeats_them() -> None:
    """Llama 3 8B has 8 of them, 1024 x 4096 a projection: on 16 ranks each still holds one head of each."""
    block = zoo.named("llama-3-8b").kinds[0]
    whole = one(block_elements(block, columns_with({"tp": 1})).unsharded)
    repeated = 2 * 1024 * 4096
    held = one(block_elements(block, columns_with({"tp": 16})).unsharded)
    norms = 2 * 4096
    assert held == (whole - norms - repeated) / 16 + repeated / 8 + norms
