"""Models as they are: Hugging Face causal LMs or any nn.Module, built on meta, described, filled. No parallelism."""
