"""The engine: executes a plan on a model. Mesh, axes, precision, optimizer, clip; one step at a time."""
