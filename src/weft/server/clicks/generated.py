"""A generated click log in the layout of Criteo's: sample i is a function of (seed, i) alone.

Nothing is stored, so a log of 10**9 samples costs as little as one of 10. The weights of the hidden model are hashes of
(seed, field, value) too:

    value of field f  ~ Zipf over v_f values, v_f from 10 to `vocabulary` in geometric steps
    logit = bias + a * sum_f w_f[value] + b * sum_pairs z_f[value] . z_g[value'] + c * sum_j u_j * log(1 + count_j)
    label = 1 with probability sigmoid(logit): the noise that no model can learn
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from weft.data.order import mix64
from weft.server.clicks.samples import ClickBatch, field_keys, log_scale

_SMALLEST_VOCABULARY = 10
_NUM_PAIRS = 6
_LATENT_DIM = 2
_MAIN, _PAIRS, _NUMERIC, _BIAS = 1.2, 1.0, 0.8, -1.0  # deviations of the parts of the logit, and its centre
_MISSING_SHARE = 0.1  # of numeric values
_MEAN_COUNTS = (1.0, 3.0, 10.0, 40.0)  # of numeric fields, in turn
# Counters of the draws: categorical field f is f, numeric field j is _NUMERIC_DRAW + j.
_NUMERIC_DRAW, _LABEL_DRAW = 1 << 16, 1 << 17
_WEIGHT_STREAM, _NUMERIC_STREAM, _LATENT_STREAM = 1, 2, 3
_UNIT = 2.0**-53
_DEVIATIONS = 12.0**0.5  # of a uniform draw of width 1, inverted


class GeneratedClicks:
    """The log; `read` generates the samples."""

    def __init__(
        self, *, num_samples: int, categorical: int, numeric: int, vocabulary: int, zipf: float, seed: int
    ) -> None:
        self.num_samples = num_samples
        self._categorical = categorical
        self._numeric = numeric
        self._zipf = zipf
        self._root = mix64(np.array([seed], dtype=np.uint64))  # an array: numpy warns where a lone word wraps
        self._vocabularies = _vocabularies(categorical, largest=vocabulary)

    def read(self, indices: NDArray[np.int64]) -> ClickBatch:
        samples = mix64(indices.astype(np.uint64) ^ self._root)
        values = self._values(samples)
        numeric = self._counts(samples)
        chance = 1.0 / (1.0 + np.exp(-self.logits(values, numeric)))
        labels = _uniform(_draw(samples, np.array([_LABEL_DRAW])))[:, 0] < chance
        return ClickBatch(keys=field_keys(values), numeric=numeric, labels=labels.astype(np.float32))

    def logits(self, values: NDArray[np.uint64], numeric: NDArray[np.float32]) -> NDArray[np.float64]:
        """The hidden model."""
        main = self._weights(values, np.arange(self._categorical), stream=_WEIGHT_STREAM).sum(axis=1)
        total = _BIAS + _MAIN * main / np.sqrt(self._categorical)
        if self._pairs.size:
            left, right = (self._latents(values, self._pairs[:, side]) for side in (0, 1))
            total = total + _PAIRS * (left * right).sum(axis=(1, 2)) / np.sqrt(len(self._pairs) * _LATENT_DIM)
        if self._numeric:
            total = total + _NUMERIC * (numeric - numeric_means(self._numeric)) @ self._numeric_weights
        result: NDArray[np.float64] = total
        return result

    @cached_property
    def _pairs(self) -> NDArray[np.int64]:
        """Neighbouring fields from the small vocabularies up: no model could learn pairs of rare values."""
        count = min(_NUM_PAIRS, self._categorical // 2)
        return np.arange(2 * count).reshape(count, 2)

    @cached_property
    def _numeric_weights(self) -> NDArray[np.float64]:
        numbers = np.arange(self._numeric, dtype=np.uint64)
        weights = _centred(mix64(numbers ^ mix64(self._root + np.uint64(_NUMERIC_STREAM))))
        return weights / float(np.sqrt(self._numeric))

    def _values(self, samples: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Bounded Zipf by its inverse: rank = (1 + u * (v**(1-s) - 1)) ** (1/(1-s)), from 0."""
        uniform = _uniform(_draw(samples, np.arange(self._categorical)))
        sizes = self._vocabularies.astype(np.float64)
        if self._zipf == 1.0:
            ranks = sizes**uniform
        else:
            power = 1.0 - self._zipf
            ranks = (1.0 + uniform * (sizes**power - 1.0)) ** (1.0 / power)
        return np.minimum(ranks, sizes).astype(np.uint64) - np.uint64(1)

    def _counts(self, samples: NDArray[np.uint64]) -> NDArray[np.float32]:
        """Exponentially distributed counts; some are missing."""
        draws = _uniform(_draw(samples, _NUMERIC_DRAW + np.arange(self._numeric)))
        present = draws >= _MISSING_SHARE
        uniform = np.where(present, (draws - _MISSING_SHARE) / (1.0 - _MISSING_SHARE), 0.0)
        counts = np.floor(-_mean_counts(self._numeric) * np.log1p(-uniform))
        return log_scale(counts.astype(np.float32))

    def _weights(self, values: NDArray[np.uint64], fields: NDArray[np.int64], *, stream: int) -> NDArray[np.float64]:
        salts = mix64(mix64(fields.astype(np.uint64)) ^ (self._root + np.uint64(stream)))
        return _centred(mix64(values ^ salts))

    def _latents(self, values: NDArray[np.uint64], fields: NDArray[np.int64]) -> NDArray[np.float64]:
        columns = [
            self._weights(values[:, fields], fields, stream=_LATENT_STREAM + column) for column in range(_LATENT_DIM)
        ]
        return np.stack(columns, axis=2)


def numeric_means(num_fields: int) -> NDArray[np.float64]:
    """About the mean of log(1 + count) of each numeric field, so that the numeric part of the logit is centred."""
    return 0.8 * (1.0 - _MISSING_SHARE) * np.log1p(_mean_counts(num_fields))


def _mean_counts(num_fields: int) -> NDArray[np.float64]:
    return np.resize(np.array(_MEAN_COUNTS), num_fields)


def _vocabularies(num_fields: int, *, largest: int) -> NDArray[np.int64]:
    smallest = min(_SMALLEST_VOCABULARY, largest)
    return np.round(np.geomspace(largest, smallest, num_fields)[::-1]).astype(np.int64)


def _draw(samples: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Independent 64-bit draws, [samples, counters]."""
    return mix64(samples[:, np.newaxis] ^ mix64(counters.astype(np.uint64))[np.newaxis])


def _uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    return (words >> np.uint64(11)).astype(np.float64) * _UNIT


def _centred(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform with mean 0 and deviation 1."""
    return (_uniform(words) - 0.5) * _DEVIATIONS
