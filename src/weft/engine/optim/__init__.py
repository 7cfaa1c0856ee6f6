"""Optimizers: construction, group rates, gradient norm and clipping, AdamW with low-precision states."""
