"""Codes of a matrix that err least in what the matrix computes, not in its weights (GPTQ, arXiv:2210.17323).

    error = |X (W - W')^T|^2 = sum over rows of (w - w') G (w - w')^T        G = X^T X of calibration inputs X

Columns are rounded one after the other, those of the largest inputs first; what rounding a column costs is added to the
columns not rounded yet, by the inverse of G. Scales are chosen before, per group of columns in place, so the stored
format is that of rounding to nearest. A row on which the greedy order lost keeps the codes of rounding to nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.models.weight_codes import WeightFormat, dequantised, quantise, to_codes

_DAMPING = 0.01  # of the mean of G's diagonal, added to it; tenfold until G can be factorised
_LAZY_COLUMNS = 128  # corrections of later columns are added once per so many


def calibrated_codes(
    weight: Tensor, gram: Tensor, form: WeightFormat, *, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] and scales [rows, groups], as `quantise` gives them; `gram` is [columns, columns]."""
    weight, gram = weight.float(), gram.float()
    importance = gram.diagonal() + 1e-6 * gram.diagonal().mean().clamp_min(1e-30)
    codes, scales = quantise(weight, form, scale_dtype=scale_dtype, importance=importance)
    codes = _compensated(weight, gram, scales, form)
    plain = quantise(weight, form, scale_dtype=scale_dtype)
    better = (_row_errors(weight, codes, scales, gram) <= _row_errors(weight, *plain, gram)).unsqueeze(1)
    # torch.where has no float8
    kept = torch.where(better, codes.view(torch.uint8), plain[0].view(torch.uint8)).view(codes.dtype)
    return kept, torch.where(better, scales, plain[1])


def _row_errors(weight: Tensor, codes: Tensor, scales: Tensor, gram: Tensor) -> Tensor:
    error = dequantised(codes, scales) - weight
    return ((error @ gram) * error).sum(1)


def _compensated(weight: Tensor, gram: Tensor, scales: Tensor, form: WeightFormat) -> Tensor:
    order = gram.diagonal().argsort(descending=True)
    width = weight.shape[1] // scales.shape[1]
    factor = _inverse_factor(gram[order][:, order])
    left = weight[:, order].clone()
    codes = torch.empty(weight.shape, dtype=to_codes(weight[:1, :1], form).dtype, device=weight.device)
    for begin in range(0, weight.shape[1], _LAZY_COLUMNS):
        end = min(begin + _LAZY_COLUMNS, weight.shape[1])
        errors = torch.zeros(weight.shape[0], end - begin, device=weight.device)
        for place in range(begin, end):
            column = int(order[place])
            scale = scales[:, column // width].float()
            codes[:, column] = to_codes(left[:, place] / scale, form)
            error = (left[:, place] - codes[:, column].float() * scale) / factor[place, place]
            left[:, place:end] -= error.unsqueeze(1) * factor[place, place:end]
            errors[:, place - begin] = error
        left[:, end:] -= errors @ factor[begin:end, end:]
    return codes


def _inverse_factor(gram: Tensor) -> Tensor:
    """The upper triangular U with U^T U = the inverse of the damped G."""
    diagonal = gram.diagonal()
    unused = diagonal == 0
    damping = _DAMPING * diagonal.mean().clamp_min(1e-30)
    while True:
        damped = gram + torch.diag(damping + unused.float())
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping = damping * 10
