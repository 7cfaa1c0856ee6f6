"""The --device choice, shared by the verbs that run something."""

from __future__ import annotations

from enum import StrEnum


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
