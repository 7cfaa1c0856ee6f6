"""Tensor parallelism: a region's weights and work sharded over ranks in one dimension (`tp_grid`: on a grid)."""
