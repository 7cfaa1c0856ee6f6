"""Dry runs: memory and traffic of one rank of any world, on fake tensors and a fake process group, without devices."""
