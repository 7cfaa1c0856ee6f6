"""Tensor parallelism: a region's work divided over ranks, in one dimension or on a grid."""
