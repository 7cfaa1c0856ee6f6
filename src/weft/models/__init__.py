"""Hugging Face causal LMs or any nn.Module: built on meta, described, filled with weights. No parallelism."""
