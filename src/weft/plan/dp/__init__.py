"""Data parallelism in the planner."""
