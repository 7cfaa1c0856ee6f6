"""Pipeline parallelism: stages of an unmodified model, ordered p2p messages, and runners of a schedule's actions."""
