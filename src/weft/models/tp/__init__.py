"""Tensor parallelism of a model: which modules shard, how each parameter divides, what stays replicated and why."""
