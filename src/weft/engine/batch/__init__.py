"""Rows of a batch: rows per rank, micro-batches, packed sequences."""
