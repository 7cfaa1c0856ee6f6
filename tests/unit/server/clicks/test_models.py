"""The click models against their formulas, written out over pairs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from weft.core.server_spec import ServerRun
from weft.server.clicks.models import ClickModel, pairwise_products
from weft.server.model.embedding import RowSession


def test_pairwise_products_are_the_sum_over_pairs() -> None:
    vectors = torch.randn(3, 5, 4, dtype=torch.float64)
    wanted = sum((vectors[:, f] * vectors[:, g]).sum(1) for f, g in itertools.combinations(range(5), 2))
    torch.testing.assert_close(pairwise_products(vectors), wanted)


@pytest.mark.parametrize("kind", ["logistic", "wide_deep", "deepfm"])
@pytest.mark.parametrize("numeric", [0, 2])
def test_logits_are_the_sum_of_the_parts(kind: str, numeric: int) -> None:
    run = ServerRun.from_tables(
        {"model": {"kind": kind, "embedding_dim": 3, "hidden": [4]}, "data": {"categorical": 2, "numeric": numeric}}
    )
    model = ClickModel(run)
    dim = model.embedding.spec.dim
    assert dim == (1 if kind == "logistic" else 4)
    table = torch.randn(6, dim)
    keys, counts = torch.tensor([[0, 3], [1, 5]]), torch.randn(2, numeric)
    with RowSession(lambda wanted: {name: table.numpy()[k] for name, k in wanted.items()}):
        found = model(keys, counts)
    rows = table[keys]
    wanted = rows[..., 0].sum(1) + model.bias
    if numeric:
        wanted = wanted + counts @ model.numeric.weight[0]
    if kind != "logistic":
        wanted = wanted + model.deep(torch.cat([rows[:, 0, 1:], rows[:, 1, 1:], counts], dim=1))[:, 0]
    if kind == "deepfm":
        wanted = wanted + (rows[:, 0, 1:] * rows[:, 1, 1:]).sum(1)
    torch.testing.assert_close(found, wanted)
    assert np.isfinite(found.detach().numpy()).all()
