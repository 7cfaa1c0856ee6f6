"""Vocabulary sizes: of the byte tokenizer, and of a model that takes its tokenizer's. Shared arithmetic."""

from __future__ import annotations

BYTES = "bytes"  # the name of the built-in tokenizer
BYTE_VOCABULARY = 257  # the 256 bytes and the end of a document
MULTIPLE = 64  # a padded vocabulary divides over tensor-parallel ranks and suits tensor cores


def padded(vocab_size: int) -> int:
    """The vocab_size of a random-weight model whose config gives none."""
    return -(-vocab_size // MULTIPLE) * MULTIPLE
