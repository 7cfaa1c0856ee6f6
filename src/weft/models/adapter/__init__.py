"""Low-rank adapters: the layers that get one, their factors, values, PEFT's folder format, and merging."""
