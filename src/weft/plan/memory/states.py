"""Bytes of optimizer states on a rank, for every plan."""

from __future__ import annotations

import numpy as np

from weft.plan import muon
from weft.plan.columns import Floats
from weft.plan.request import DTYPE_BYTES
from weft.plan.view import View


def state_bytes(view: View, held: Floats) -> Floats:
    """States of `held` parameters: a number of bytes each, where an optimizer treats all of them alike."""
    bytes_of_all = np.asarray(held * view.sizes.optimizer, dtype=np.float64)
    if view.request.workload.optimizer == "muon":  # one state of a matrix, not two
        return bytes_of_all - DTYPE_BYTES[view.request.precision.second_moment] * muon.matrix_elements(view)
    return bytes_of_all
