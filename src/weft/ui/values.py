"""The values of a step that the page draws, in the names of metrics.jsonl."""

VALUES = (
    "loss",
    "eval_loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_s",
    "samples_per_s",
    "step_s",
    "peak_memory_bytes",
    "loss_scale",
    "expert_load",
    "dropped_share",
    "auc",
    "staleness_mean",
    "wait_s",
)
