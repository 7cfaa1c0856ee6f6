"""Tensor parallelism of a model: sharded modules, the shards of each parameter, reasons for replicated ones."""
