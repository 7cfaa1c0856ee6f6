"""The measured timeline of a pipeline: recorded during the first steps, written as pipeline.json."""
