"""The two figures of a click model on held-out samples: area under the ROC curve, and log loss.

AUC is exact, by ranks; equal scores share the mean of their ranks, so a constant score gives 0.5:

    auc = (sum of ranks of the positives - p (p + 1) / 2) / (p n)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def area_under_curve(labels: NDArray[np.float32], scores: NDArray[np.float32]) -> float | None:
    """None where every label is the same: there is no pair to compare."""
    positive = labels > 0.5
    num_positive = int(positive.sum())
    num_negative = len(labels) - num_positive
    if num_positive == 0 or num_negative == 0:
        return None
    above = float(_mean_ranks(scores)[positive].sum()) - num_positive * (num_positive + 1) / 2
    return above / (num_positive * num_negative)


def log_loss_sum(labels: NDArray[np.float32], logits: NDArray[np.float32]) -> float:
    """Sum over samples of log(1 + e**x) - y x, without overflow."""
    scores = logits.astype(np.float64)
    return float((np.logaddexp(0.0, scores) - labels * scores).sum())


def _mean_ranks(scores: NDArray[np.float32]) -> NDArray[np.float64]:
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    result: NDArray[np.float64] = (last_rank - (counts - 1) / 2.0)[group]
    return result
