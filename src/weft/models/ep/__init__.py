"""Where a model's experts are: a description for any degree of expert parallelism."""
