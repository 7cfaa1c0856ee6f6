"""Context parallelism: each rank has a part of every row's positions."""
