"""Bytes of weights at rest on a rank, for every plan.

trained                     elements x master dtype (or the compute dtype where masters leave)
frozen                      the same; with adapter.base beside "model" the compute dtype
frozen matrices in codes    elements x bytes of a code with its share of a scale
"""

from __future__ import annotations

import numpy as np

from weft.plan.columns import Floats
from weft.plan.memory.parameters import Elements, share_of
from weft.plan.time.state_stream import rest_bytes
from weft.plan.view import View


def weight_bytes(view: View) -> Floats:
    """Weights of this rank between steps."""
    held, at_rest = _held(view, view.share.total), rest_bytes(view)
    if not view.shape.has_low_base:
        return np.asarray(held * at_rest, dtype=np.float64)
    trained, compute = _held(view, view.trained.total), float(view.sizes.compute)
    found = trained * at_rest + (held - trained) * compute
    for size in view.shape.code_sizes:
        in_codes = _held(view, share_of(view.shape.in_codes(size), view.columns, view.stage).total)
        found = found - in_codes * (compute - size)
    return np.asarray(found, dtype=np.float64)


def _held(view: View, elements: Elements) -> Floats:
    return np.where(view.columns.zero > 0, elements.shard, elements.unsharded)


def largest_values(view: View) -> Floats:
    """The values of the largest matrix in codes, which exist while it multiplies."""
    sizes = [one.in_features * one.out_features for kind in view.shape.kinds for one in kind.linears if one.code_bytes]
    return np.asarray(max(sizes, default=0) * view.sizes.compute / view.columns.tp, dtype=np.float64)
