"""Click logs and the models that learn from them: a generated log, readers of the Criteo layout, DeepFM and its kin.

Nothing here knows of servers: a model reads its rows through `ShardedEmbedding`, and a log is an array of samples.
"""
