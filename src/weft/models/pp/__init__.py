"""Pipeline parallelism of a model: where it can be split, block costs, placeholders for absent parts."""
