"""Rows of a batch: shares of ranks, micro-batches, packed sequences."""
