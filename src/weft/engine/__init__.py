"""The engine: carries a plan out on a model. Mesh, data parallelism, precision, optimizer, clip; one step at a time."""
