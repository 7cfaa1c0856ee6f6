"""Data parallelism: one file per strategy, all behind the interface of `strategy.py`."""
