"""Memory of the fused head and loss, per chunk, for every plan: logits, and gradients computed with the loss.

A head that is sharded over tp uses its slice of the vocabulary, with or without loss_parallel.
"""

from __future__ import annotations

import numpy as np

from weft.plan.columns import Bools, Floats
from weft.plan.view import View

CHUNK_ELEMENTS = 2**29  # logits per chunk, at most
FLOAT32_ELEMENTS = 2**26  # logits in float32 at a time with a sharded head; other heads use one kernel without them


def is_sharded(view: View) -> Bools:
    return np.asarray((view.columns.tp > 1) & view.shape.has_sharded_head)


def num_chunks(view: View) -> Floats:
    return np.asarray(np.ceil(view.tokens / np.maximum(1, CHUNK_ELEMENTS // _own_vocab(view))), dtype=np.float64)


def loss_bytes(view: View) -> Floats:
    """One chunk of logits; a sharded head also has float32 logits, twice with a soft cap."""
    chunk = np.ceil(view.tokens / np.maximum(num_chunks(view), 1)) * _own_vocab(view)
    copies = 2 if view.shape.caps_logits else 1
    float32 = np.where(is_sharded(view), 4.0 * copies * np.minimum(chunk, FLOAT32_ELEMENTS), 0.0)
    return np.asarray(chunk * view.sizes.activation + float32, dtype=np.float64)


def gradient_bytes(view: View) -> Floats:
    """Gradients of the head and of its input, which come with the loss; the head's in float32 if there are chunks."""
    vocab, width = _own_vocab(view), view.shape.hidden_size
    per_weight = np.where(view.tokens * vocab > CHUNK_ELEMENTS, 4, view.sizes.activation)
    return np.asarray(vocab * width * per_weight + view.tokens * width * view.sizes.activation, dtype=np.float64)


def _own_vocab(view: View) -> Floats:
    return np.asarray(np.ceil(view.shape.vocab_size / np.where(is_sharded(view), view.columns.tp, 1)), dtype=np.float64)
