"""Pipeline parallelism in the planner."""
