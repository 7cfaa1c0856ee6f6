"""Grids of tensor-parallel ranks in the planner."""
