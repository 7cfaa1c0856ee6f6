"""The `ModelShape` of a causal LM, derived from the model itself on the meta device."""
