"""Optimizer states in the host's memory, and their update on the device or on the host."""
