"""Context parallelism in the planner."""
