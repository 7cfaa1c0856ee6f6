"""What a loss that is fused with its head has at a time, for every plan: a stretch of logits, and gradients that are
there with the loss. A head that is cut over tensor ranks has its slice of the vocabulary, whatever loss_parallel says.
"""

from __future__ import annotations

import numpy as np

from weft.plan.columns import Bools, Floats
from weft.plan.view import View

STRETCH_ELEMENTS = 2**29  # logits at a time, at most
PIECE_ELEMENTS = 2**26  # of these in float32 at a time, where the head is cut: one kernel does without elsewhere


def is_cut(view: View) -> Bools:
    return np.asarray((view.columns.tp > 1) & view.shape.has_cut_head)


def num_stretches(view: View) -> Floats:
    return np.asarray(np.ceil(view.tokens / np.maximum(1, STRETCH_ELEMENTS // _own_vocab(view))), dtype=np.float64)


def loss_bytes(view: View) -> Floats:
    """A stretch of logits; where the head is cut also float32 of a piece of it, twice under a cap."""
    stretch = np.ceil(view.tokens / np.maximum(num_stretches(view), 1)) * _own_vocab(view)
    copies = 2 if view.shape.caps_logits else 1
    piece = np.where(is_cut(view), 4.0 * copies * np.minimum(stretch, PIECE_ELEMENTS), 0.0)
    return np.asarray(stretch * view.sizes.activation + piece, dtype=np.float64)


def gradient_bytes(view: View) -> Floats:
    """Of the head and of its input, there with the loss: the head's in float32 where rows come in stretches."""
    vocab, width = _own_vocab(view), view.shape.hidden_size
    a_weight = np.where(view.tokens * vocab > STRETCH_ELEMENTS, 4, view.sizes.activation)
    return np.asarray(vocab * width * a_weight + view.tokens * width * view.sizes.activation, dtype=np.float64)


def _own_vocab(view: View) -> Floats:
    return np.asarray(np.ceil(view.shape.vocab_size / np.where(is_cut(view), view.columns.tp, 1)), dtype=np.float64)
