"""The files of a run: run folder, lock, state, history, metrics.jsonl, changes between two starts."""
