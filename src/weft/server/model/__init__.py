"""The model of a run: embeddings with rows on servers, dense parameters as rows, the task around them."""
