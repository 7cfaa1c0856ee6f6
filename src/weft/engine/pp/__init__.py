"""Pipeline parallelism: stages of an unmodified model, messages in order, and the walk over a schedule's actions."""
