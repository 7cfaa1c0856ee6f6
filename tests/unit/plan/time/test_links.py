"""Ring factors, and what an axis reaches where it leaves the node."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import columns_with, one, request_of

from weft.core import axes
from weft.plan.time.links import (
    axis_link,
    backward_link,
    context_links,
    expert_link,
    gather_bytes,
    inner_degree,
    reduce_bytes,
)

FOUR_NODES = request_of(devices="4x8xH100-80GB").cluster
INSIDE, BETWEEN = FOUR_NODES.inside, FOUR_NODES.between


@pytest.mark.parametrize(("degree", "factor"), [(1, 0), (2, 1 / 2), (4, 3 / 4), (8, 7 / 8)])
def test_ring_factors(degree: int, factor: float) -> None:
    size, n = np.asarray([1000.0]), np.asarray([float(degree)])
    assert one(gather_bytes(size, n)) == pytest.approx(1000 * factor)
    assert one(reduce_bytes(size, n)) == pytest.approx(2000 * factor)


@given(degree=st.integers(1, 1024), shard_bytes=st.integers(1, 10**9))
def test_an_all_gather_delivers_what_is_sent(degree: int, shard_bytes: int) -> None:
    """n ranks send what n ranks receive: each must get the n - 1 shards it has not."""
    whole = np.asarray([float(degree * shard_bytes)])
    sent = degree * one(gather_bytes(whole, np.asarray([float(degree)])))
    assert sent == pytest.approx(degree * (degree - 1) * shard_bytes)


def test_neighbours_on_an_axis_are_as_far_apart_as_the_axes_inside_it() -> None:
    columns = columns_with({"dp_replicate": 2, "dp_shard": 3, "cp": 5, "tp": 7, "pp": 11, "zero": 1})
    found = {axis: tuple(map(one, inner_degree(columns, (axis,)))) for axis in axes.MESH_ORDER}
    assert found == {"tp": (1, 7), "cp": (7, 5), "dp_shard": (35, 3), "dp_replicate": (105, 2), "pp": (210, 11)}
    assert tuple(map(one, inner_degree(columns, ("dp_shard", "cp")))) == (7, 15)


def test_an_axis_inside_the_node_uses_its_links() -> None:
    link = axis_link(FOUR_NODES, columns_with({"tp": 8, "dp_shard": 4, "zero": 1}), (axes.TP,))
    assert one(link.bytes_per_s) == INSIDE.bytes_per_s
    assert one(link.latency_s) == INSIDE.latency_s


def test_an_axis_with_one_rank_a_node_has_one_network_card() -> None:
    link = axis_link(FOUR_NODES, columns_with({"tp": 8, "dp_shard": 4, "zero": 1}), (axes.DP_SHARD,))
    assert one(link.bytes_per_s) == BETWEEN.bytes_per_s
    assert one(link.latency_s) == BETWEEN.latency_s


@pytest.mark.parametrize(("tp", "cards"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_an_axis_that_fills_k_places_of_a_node_drives_k_cards(tp: int, cards: int) -> None:
    columns = columns_with({"tp": tp, "dp_shard": 32 // tp, "zero": 1})
    link = axis_link(FOUR_NODES, columns, (axes.DP_SHARD,))
    assert one(link.bytes_per_s) == min(INSIDE.bytes_per_s, cards * BETWEEN.bytes_per_s)


def test_latency_grows_with_the_ring_up_to_a_tree() -> None:
    columns = columns_with({"dp_shard": 2, "zero": 1}, {"dp_shard": 8, "zero": 1}, {"dp_shard": 1})
    link = axis_link(FOUR_NODES, columns, (axes.DP_SHARD,))
    # 2 ranks: one step; 8 ranks: 2 log2(8) = 6 of the ring's 7; one rank sends nothing and waits for nobody
    seconds = link.seconds(np.zeros(3), num_calls=np.asarray([10.0, 10.0, 10.0]))
    assert seconds.tolist() == pytest.approx([10 * INSIDE.latency_s, 60 * INSIDE.latency_s, 0])


def test_what_leaves_the_node_in_an_exchange_goes_through_one_card() -> None:
    """32 expert ranks on 4 nodes: 24 of a rank's 31 partners are elsewhere."""
    link = expert_link(FOUR_NODES, columns_with({"dp_shard": 32, "ep": 32, "zero": 1}))
    assert one(link.off_node) == pytest.approx(24 / 31)
    moved = 31e9
    expected = 24e9 / BETWEEN.bytes_per_s + BETWEEN.latency_s
    assert one(link.exchange_seconds(np.asarray([moved]))) == pytest.approx(expected)


def test_an_exchange_inside_the_node_never_leaves_it() -> None:
    link = expert_link(FOUR_NODES, columns_with({"dp_shard": 32, "ep": 8, "zero": 1}))
    assert one(link.exchange_seconds(np.asarray([7e9]))) == pytest.approx(7e9 / INSIDE.bytes_per_s + INSIDE.latency_s)


def test_neighbours_exchange_heads_inside_a_node_and_pass_keys_between_nodes() -> None:
    near, far = context_links(FOUR_NODES, columns_with({"cp": 16, "tp": 2, "ulysses": 4, "attention": "ring"}))
    assert (one(near.degree), one(near.off_node), one(near.bytes_per_s)) == (4, 0, INSIDE.bytes_per_s)
    assert (one(far.degree), one(far.off_node), one(far.bytes_per_s)) == (4, 1, BETWEEN.bytes_per_s)


def test_a_hop_waits_for_the_message_that_leaves_its_node() -> None:
    """Eight ranks of a ring are on each node, and one of them sends to the next node, through its own card."""
    _, across = context_links(FOUR_NODES, columns_with({"cp": 32, "attention": "ring"}))
    _, inside = context_links(FOUR_NODES, columns_with({"cp": 8, "attention": "ring"}))
    moved = np.asarray([7e9])
    assert one(across.hop_seconds(moved)) == pytest.approx(7e9 / BETWEEN.bytes_per_s + BETWEEN.latency_s)
    assert one(inside.hop_seconds(moved)) == pytest.approx(7e9 / INSIDE.bytes_per_s + INSIDE.latency_s)


def test_experts_on_the_tensor_axis_are_neighbours() -> None:
    """Eight tensor ranks that deal eight experts out among them share a node; tp apart they would be on eight."""
    link = expert_link(FOUR_NODES, columns_with({"tp": 8, "dp_shard": 4, "ep": 8, "zero": 1}))
    assert one(link.off_node) == 0
    apart = expert_link(FOUR_NODES, columns_with({"tp": 8, "dp_shard": 4, "ep": 4, "zero": 1, "tensor": "width"}))
    assert one(apart.off_node) > 0


@given(degree=st.sampled_from([1, 2, 4, 8, 16, 32]), moved=st.floats(0, 1e12))
def test_more_bytes_never_take_less_time(degree: int, moved: float) -> None:
    link = axis_link(FOUR_NODES, columns_with({"dp_shard": degree, "zero": 1}), (axes.DP_SHARD,))
    fewer, more = (one(link.seconds(np.asarray([amount]))) for amount in (moved, 2 * moved + 1))
    assert 0 <= fewer <= more


def test_a_secondary_shard_stays_on_its_node() -> None:
    columns = columns_with(*({"dp_shard": 32, "zero": 3, "secondary_shard": size} for size in (0, 8, 16)))
    assert [bool(off) for off in backward_link(FOUR_NODES, columns).off_node] == [True, False, True]
    assert list(backward_link(FOUR_NODES, columns).degree) == [32, 8, 16]
