"""Data parallelism: one file a strategy, all behind the same small face."""
