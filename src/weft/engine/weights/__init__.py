"""Initial values and memory of parameters on each rank; frozen parameters."""
