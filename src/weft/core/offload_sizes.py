"""Sizes of offload that planner and engine share."""

CHUNK_ELEMENTS = 1 << 24  # elements of a chunk of states that streams through the device
SLOTS = 3  # chunks in flight
