"""The matrix sign by Newton-Schulz: five quintic steps towards U V^T of X = U S V^T. Not exact: S ends in 0.7 to 1.2.

X <- X / |X|;   five times:  A = X X^T;  X <- a X + (b A + c A A) X
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.muon import COEFFICIENTS, EPSILON, STEPS


def orthogonalised(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """One matrix [rows, columns] or several [..., rows, columns], computed and returned in `dtype`."""
    a, b, c = COEFFICIENTS
    given = matrices.to(dtype)
    is_tall = given.shape[-2] > given.shape[-1]
    x = given.mT if is_tall else given
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(STEPS):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
