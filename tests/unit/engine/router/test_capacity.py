"""Capacity of experts: which choices are dropped, how they are counted, and that an evaluation drops none."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from router_engines import FAMILIES
from tiny import build_engine, global_batch

from weft.core.errors import ModelError, NotBuiltError
from weft.core.run_spec import ModelSpec, RouterSpec
from weft.engine.activations.recomputing import recomputing
from weft.engine.router.capacity import drop, expert_capacity
from weft.engine.router.sums import choices_of, drops_of, row_size

MODEL = ModelSpec(type="qwen3_moe", config=FAMILIES["qwen3_moe"])


@pytest.mark.parametrize("factor", [0.1, 0.3, 1.0, 1.1, 1.25, 2.0])
@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), [(10, 1, 1), (16, 2, 6), (30, 3, 9), (4096, 8, 128)])
def test_the_capacity_is_the_ceiling_of_the_written_product(
    factor: float, tokens: int, top_k: int, num_experts: int
) -> None:
    """0.1 x 30 is 3 and not 4, though the product of floats is above 3."""
    found = expert_capacity(factor, tokens=tokens, top_k=top_k, num_experts=num_experts)
    exact = Fraction(str(factor)) * tokens * top_k / num_experts
    assert found - 1 < exact <= found


def dropped(
    index: list[list[int]], *, factor: float, length: int, num_experts: int = 2
) -> tuple[list[list[float]], int]:
    chosen, row = torch.tensor(index), torch.zeros(row_size(num_experts), dtype=torch.float64)
    given = {"factor": factor, "sequence_length": length, "num_experts": num_experts}
    weights = drop(torch.ones(chosen.shape), chosen, row, **given)  # type: ignore[arg-type]
    with recomputing():
        again = drop(torch.ones(chosen.shape), chosen, row, **given)  # type: ignore[arg-type]
    assert torch.equal(weights, again)
    assert not choices_of(row, num_experts).any()
    return weights.tolist(), int(drops_of(row, num_experts))


def test_an_expert_keeps_the_earliest_tokens_of_each_sequence() -> None:
    """A capacity of 2 in sequences of 4 tokens; a recomputed forward is not counted."""
    weights, count = dropped([[0], [0], [0], [1], [0], [1], [1], [1]], factor=1.0, length=4)
    assert weights == [[1], [1], [0], [1], [1], [1], [1], [0]]
    assert count == 2


def test_longer_sequences_are_other_sequences() -> None:
    index = [[0], [0], [0], [1], [0], [1], [1], [1]]
    assert dropped(index, factor=1.0, length=8)[1] == 0
    assert dropped(index, factor=1.0, length=2)[1] == 2
    assert dropped(index, factor=0.5, length=4)[1] == 4


def test_identity_experts_have_no_capacity() -> None:
    assert dropped([[2, 0], [2, 0], [3, 0], [2, 0]], factor=0.5, length=4)[0] == [[1, 1], [1, 1], [1, 0], [1, 0]]


def test_a_dropped_weight_has_no_gradient_and_the_others_stay() -> None:
    weights, row = torch.tensor([[0.3, 0.7], [0.4, 0.6]], requires_grad=True), torch.zeros(row_size(3)).double()
    kept = drop(weights, torch.tensor([[0, 1], [0, 2]]), row, factor=0.5, sequence_length=2, num_experts=3)
    assert kept.flatten().tolist() == pytest.approx([0.3, 0.7, 0.0, 0.6])
    kept.sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [[1, 1], [0, 1]]


def test_choices_that_are_not_full_sequences_are_refused() -> None:
    with pytest.raises(ModelError, match="sequences of 4 tokens") as refused:
        dropped([[0], [0], [1]], factor=1.0, length=4)
    assert "capacity_factor" in refused.value.hint


def test_a_step_counts_drops_and_an_evaluation_drops_none() -> None:
    plain, limited = build_engine(MODEL), build_engine(MODEL, router=RouterSpec(capacity_factor=0.5))
    assert plain.evaluate(global_batch(0)).loss == limited.evaluate(global_batch(0)).loss
    pending = limited.step_nowait(global_batch(0))
    record, _ = pending.resolve()
    free = plain.step(global_batch(0))
    assert free.dropped_share is None
    assert record.dropped_share is not None
    assert 0.3 < record.dropped_share < 0.9
    assert record.loss != free.loss
    assert record.expert_load == free.expert_load, "loads are the router's choices, dropped or not"
    assert pending.router is not None
    loads, tokens = pending.router.loads(1), global_batch(0)["input_ids"].numel()
    assert loads.dropped is not None
    assert sum(loads.dropped) == pytest.approx(record.dropped_share * len(loads.dropped) * 2 * tokens)


def test_the_plan_may_set_it() -> None:
    planned = build_engine(MODEL, {"expert_parallel": {"capacity_factor": 0.5}})
    given = build_engine(MODEL, router=RouterSpec(capacity_factor=0.5))
    one, other = planned.step(global_batch(0)), given.step(global_batch(0))
    assert one.dropped_share
    assert (one.loss, one.grad_norm, one.dropped_share) == (other.loss, other.grad_norm, other.dropped_share)


def test_a_large_capacity_changes_no_bit() -> None:
    plain, limited = build_engine(MODEL), build_engine(MODEL, router=RouterSpec(capacity_factor=3.0))
    one, other = plain.step(global_batch(0)), limited.step(global_batch(0))
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert other.dropped_share == 0


def test_experts_that_are_not_stacked_are_refused() -> None:
    from unittest import mock

    from weft.engine.router import apply
    from weft.models.ep.finder import find_expert_layout
    from weft.models.ep.layout import ExpertLayout

    def partly(model: torch.nn.Module) -> ExpertLayout:
        return ExpertLayout(layers=find_expert_layout(model).layers[1:], declined={"first": "it is a list"})

    with (
        mock.patch.object(apply, "find_expert_layout", partly),
        pytest.raises(NotBuiltError, match="first has no capacity: it is a list"),
    ):
        build_engine(MODEL, router=RouterSpec(capacity_factor=1.0))
