"""Expert parallelism in the planner."""
