"""Tensor parallelism on grids of ranks: 2d and 2.5d (SUMMA), 3d. Builds on the context and collectives of `tp`."""
