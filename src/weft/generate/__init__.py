"""Text from a run or a Hugging Face folder: transformers' generation, with a key-value cache in 8 or 4 bits."""
