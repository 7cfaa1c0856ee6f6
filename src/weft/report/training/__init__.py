"""The page of a training: facts, curves, costs by term, pipeline, precision, coverage, checkpoints."""
