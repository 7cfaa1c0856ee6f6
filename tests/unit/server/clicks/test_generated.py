"""The generated log is a function of (seed, i), Criteo-shaped, unequal in its values, and learnable."""

from __future__ import annotations

import numpy as np

from weft.data.order import mix64
from weft.server.clicks.generated import GeneratedClicks
from weft.server.clicks.task import area_under_curve


def _log(*, seed: int = 0, numeric: int = 13, categorical: int = 26, zipf: float = 1.1) -> GeneratedClicks:
    return GeneratedClicks(
        num_samples=10_000, categorical=categorical, numeric=numeric, vocabulary=1000, zipf=zipf, seed=seed
    )


def test_a_sample_depends_on_seed_and_number_alone() -> None:
    together = _log().read(np.arange(100))
    alone = _log().read(np.array([77, 3]))
    np.testing.assert_array_equal(together.keys[[77, 3]], alone.keys)
    np.testing.assert_array_equal(together.numeric[[77, 3]], alone.numeric)
    np.testing.assert_array_equal(together.labels[[77, 3]], alone.labels)
    assert not np.array_equal(together.keys, _log(seed=1).read(np.arange(100)).keys)


def test_shapes_and_a_table_that_fields_share_without_collisions() -> None:
    batch = _log().read(np.arange(5000))
    assert batch.keys.shape == (5000, 26)
    assert batch.numeric.shape == (5000, 13)
    assert np.isfinite(batch.numeric).all()
    by_field = [set(batch.keys[:, field].tolist()) for field in range(26)]
    assert len(set.union(*by_field)) == sum(map(len, by_field))
    assert 0.2 < batch.labels.mean() < 0.5


def test_values_are_as_unequal_as_zipf_says() -> None:
    keys = _log(categorical=1, zipf=1.0).read(np.arange(10_000)).keys[:, 0]
    _, counts = np.unique(keys, return_counts=True)
    counts = np.sort(counts)[::-1]
    # Zipf 1.0 over 1000 values: the first has log(2)/log(1000) = 0.10 of the samples, ranks 512.. have 0.097 together.
    assert 0.08 < counts[0] / 10_000 < 0.13
    assert 500 < len(counts) <= 1000


def test_no_numeric_fields_and_one_categorical() -> None:
    batch = _log(numeric=0, categorical=1).read(np.arange(10))
    assert batch.numeric.shape == (10, 0)
    assert batch.keys.shape == (10, 1)


def test_the_hidden_model_explains_the_labels() -> None:
    log = _log()
    samples = mix64(np.arange(10_000, dtype=np.uint64) ^ log._root)
    values, numeric = log._values(samples), log._counts(samples)
    best = area_under_curve(log.read(np.arange(10_000)).labels, log.logits(values, numeric).astype(np.float32))
    assert best is not None
    assert 0.82 < best < 0.92
