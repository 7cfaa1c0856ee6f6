"""The contract of an axis: an axis that only replicates changes nothing, and each answer of an axis has its reader."""

from __future__ import annotations

import pytest
import torch
from tiny import build_engine, global_batch, train_steps

from weft.core.shards import LocalShard, replicated_shard
from weft.engine.axis import Axes, AxisContext
from weft.engine.engine import Engine


class Toy(AxisContext):
    axis = "toy"


class Silent(Toy):
    """Ranks of this axis compute the same loss, and this one is not the one that counts."""

    owns_loss = False

    @property
    def owns_weight(self) -> bool:
        return False


class Rows(Toy):
    """The second of two ranks that share the rows of a micro-batch."""

    row_chunks, row_chunk = 2, 1

    def rows_of(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {key: value[value.shape[0] // 2 :] for key, value in batch.items()}


def with_axis(context: AxisContext, family: str = "llama") -> Engine:
    engine = build_engine(family)
    engine.axes = Axes((*engine.axes, context))
    return engine


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_axis_that_only_replicates_changes_nothing(family: str) -> None:
    plain, toy = build_engine(family), with_axis(Toy(), family)
    assert train_steps(plain, 3) == train_steps(toy, 3)
    assert plain.evaluate(global_batch(9)) == toy.evaluate(global_batch(9))
    assert plain.coverage() == toy.coverage()
    assert plain.state().keys() == toy.state().keys()
    assert Toy.of(toy) is toy.axes[-1]
    assert Toy.of(plain) is None


def test_a_loss_that_another_rank_counts_is_left_out() -> None:
    engine = with_axis(Silent())
    assert train_steps(engine, 1)[0][0] == 0.0
    assert engine.evaluate(global_batch(9)).tokens == 0


def test_rows_of_an_axis_are_the_rows_that_are_computed() -> None:
    """Half of the rows, divided by the weight of all: the other rank adds the rest."""
    batch = global_batch(0, uneven=False)
    half = {key: value[8:] for key, value in batch.items()}
    loss = with_axis(Rows()).step(batch).loss
    assert loss == pytest.approx(build_engine("llama").step(half).loss / 2, rel=1e-6)


def test_gradients_are_summed_in_the_order_of_the_axes() -> None:
    called: list[str] = []

    def of(name: str) -> AxisContext:
        return type(name, (Toy,), {"axis": name, "sum_gradients": lambda self, trained: called.append(name)})()

    engine = build_engine("llama")
    engine.axes = Axes((of("first"), of("second")))
    train_steps(engine, 1)
    assert called == ["first", "second"]


def test_answers_of_several_axes_are_joined() -> None:
    sharding = Toy()
    sharding.shards = {"a": replicated_shard((2, 3), copies=2)}
    sharding.replicated_reasons = {"b": "too small"}
    sharding.partitions_model = True
    axes = Axes((Rows(), Rows(), sharding))
    assert (axes.row_chunks, axes.row_chunk) == (4, 3)
    assert axes.partitioning == ("toy",)
    assert isinstance(axes.shards["a"], LocalShard)
    assert axes.replicated_reasons == {"b": "too small"}
    assert axes.token_loss is None
