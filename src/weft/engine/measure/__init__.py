"""Measurements of a step: memory by term, traffic, FLOPs, times, dtypes of live tensors."""
