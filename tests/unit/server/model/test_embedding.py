"""ShardedEmbedding equals nn.Embedding and nn.EmbeddingBag, values and gradients, over a table in memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from weft.core.errors import TableError
from weft.core.table_spec import RowOptimizer
from weft.server.arrays import Keys, Rows
from weft.server.model.embedding import RowSession, ShardedEmbedding, table_specs

KEYS = np.array([-5, 3, 2**62, 11, 7], dtype=np.int64)


class _Memory:
    def __init__(self, weight: Tensor) -> None:
        self.rows = {int(key): weight[i].detach().numpy() for i, key in enumerate(KEYS)}
        self.num_reads = 0

    def read(self, wanted: Mapping[str, Keys]) -> dict[str, Rows]:
        self.num_reads += 1
        return {table: np.stack([self.rows[int(key)] for key in keys]) for table, keys in wanted.items()}


def _gradient(session: RowSession) -> Tensor:
    keys, rows = session.take_gradients()["t"]
    assert len(np.unique(keys)) == len(keys)
    dense = torch.zeros(len(KEYS), rows.shape[1])
    for key, row in zip(keys, rows, strict=True):
        dense[list(KEYS).index(key)] = torch.from_numpy(row)
    return dense


def test_mode_none_is_nn_embedding() -> None:
    reference = nn.Embedding(5, 4)
    places = torch.tensor([[0, 1, 1], [4, 0, 2]])
    session = RowSession(_Memory(reference.weight).read)
    with session:
        found = ShardedEmbedding("t", 4)(torch.from_numpy(KEYS)[places])
    wanted = reference(places)
    assert torch.equal(found, wanted)
    scale = torch.randn_like(wanted)
    (found * scale).sum().backward()
    (wanted * scale).sum().backward()
    torch.testing.assert_close(_gradient(session), reference.weight.grad)


@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)])
@pytest.mark.parametrize("flat", [False, True])
def test_a_mode_is_nn_embedding_bag(mode: str, weighted: bool, flat: bool) -> None:
    reference = nn.EmbeddingBag(5, 4, mode=mode)
    places = torch.tensor([0, 1, 1, 4, 0, 2])
    offsets = torch.tensor([0, 2, 2, 5]) if flat else None  # an empty bag in the middle
    shaped = places if flat else places.reshape(2, 3)
    weights = torch.randn(shaped.shape) if weighted else None
    session = RowSession(_Memory(reference.weight).read)
    with session:
        found = ShardedEmbedding("t", 4, mode=mode)(torch.from_numpy(KEYS)[shaped], offsets, weights)
    wanted = reference(shaped, offsets, weights)
    assert torch.equal(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(_gradient(session), reference.weight.grad)


def test_two_lookups_of_a_table_sum_their_gradients_and_a_prefetch_is_one_read() -> None:
    reference = nn.Embedding(5, 4)
    first, second = torch.tensor([0, 1]), torch.tensor([1, 2])
    wanted = (reference(first).prod() + reference(second).square().sum()) * 2
    wanted.backward()
    for is_prefetched in (False, True):
        memory = _Memory(reference.weight)
        session, embedding = RowSession(memory.read), ShardedEmbedding("t", 4)
        if is_prefetched:
            session.prefetch({"t": KEYS[[2, 0, 1, 1]]})
        with session:
            parts = [embedding(torch.from_numpy(KEYS)[places]) for places in (first, second)]
        ((parts[0].prod() + parts[1].square().sum()) * 2).backward()
        torch.testing.assert_close(_gradient(session), reference.weight.grad)
        assert memory.num_reads == (1 if is_prefetched else 2)


def test_reading_without_gradients_leaves_nothing_to_push() -> None:
    session = RowSession(_Memory(torch.randn(5, 4)).read)
    with session, torch.no_grad():
        ShardedEmbedding("t", 4)(torch.from_numpy(KEYS))
    assert session.take_gradients() == {}


def test_outside_a_session_it_says_so() -> None:
    with pytest.raises(TableError, match="outside a session"):
        ShardedEmbedding("t", 4)(torch.tensor([1]))


def test_embeddings_that_share_a_table_must_agree() -> None:
    model = nn.ModuleList([ShardedEmbedding("t", 4), ShardedEmbedding("t", 4, mode="sum"), ShardedEmbedding("u", 2)])
    assert [spec.name for spec in table_specs(model)] == ["t", "u"]
    model.append(ShardedEmbedding("t", 4, optimizer=RowOptimizer(kind="sgd")))
    with pytest.raises(TableError, match="differently"):
        table_specs(model)
