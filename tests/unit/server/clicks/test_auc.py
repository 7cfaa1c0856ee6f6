"""AUC against the definition (all pairs), log loss against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.server.clicks.task import area_under_curve, log_loss_sum


def test_auc_is_the_share_of_pairs_in_order_with_ties_as_half() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(200) < 0.3).astype(np.float32)
    scores = rng.integers(0, 12, 200).astype(np.float32)  # many ties
    positive, negative = scores[labels == 1][:, None], scores[labels == 0][None]
    wanted = ((positive > negative) + 0.5 * (positive == negative)).mean()
    assert area_under_curve(labels, scores) == pytest.approx(wanted, abs=1e-12)


def test_auc_of_constant_scores_and_of_one_class() -> None:
    assert area_under_curve(np.array([0, 1, 1, 0], np.float32), np.zeros(4, np.float32)) == 0.5
    assert area_under_curve(np.ones(4, np.float32), np.arange(4, dtype=np.float32)) is None


def test_log_loss_is_torchs_and_does_not_overflow() -> None:
    labels, logits = np.array([0, 1, 1], np.float32), np.array([200.0, -200.0, 0.5], np.float32)
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.from_numpy(logits), torch.from_numpy(labels), reduction="sum"
    )
    assert log_loss_sum(labels, logits) == pytest.approx(float(wanted), rel=1e-6)
