"""One-dimensional tensor parallelism in the planner."""
