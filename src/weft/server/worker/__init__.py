"""A worker process: units in, gradients out."""
