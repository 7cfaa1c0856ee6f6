"""Sections of plan.toml about memory: recompute of activations, offload to host and disk."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from weft.core.config import Section


class Activations(Section):
    policy: Literal["none", "full", "selective", "budget"] = Field(
        default="none",
        description="activation recompute: none | full | selective | budget (as much as memory requires)",
    )
    mixture: tuple[int, int] | None = Field(
        default=None,
        description="policy = budget: blocks recomputed [fully, selectively], as [4, 12]; absent or []: chosen for the "
        "device",
    )
    offload: Literal["none", "cpu"] = Field(
        default="none", description="where inputs of fully recomputed blocks are kept: none | cpu"
    )
    offload_blocks: int | Literal["auto"] = Field(
        default=0,
        description="offload = cpu: further blocks, not recomputed, whose saved tensors are kept on the host: a number "
        "| auto (as many as the link hides)",
    )
    partition: bool = Field(
        default=False,
        description="each tensor-parallel rank keeps its share of the inputs of recomputed blocks, and gathers them in "
        "the backward (ZeRO-R); for tp without sequence parallel",
    )
    sequence_chunk: int = Field(
        default=0,
        ge=0,
        description="positions of a rank that the MLP of a block computes at a time, and again in the backward, so "
        "that inner activations of one chunk exist; 0: all at once",
    )

    @field_validator("mixture", mode="before")
    @classmethod
    def _mixture_is_two_counts(cls, mixture: Any) -> Any:
        """Check the list as one value, like `pipeline.blocks`."""
        if not isinstance(mixture, list | tuple):
            return mixture
        if mixture and (len(mixture) != 2 or any(type(number) is not int or number < 0 for number in mixture)):
            raise ValueError("a mixture is two integers, blocks recomputed [fully, selectively], each at least 0")
        return tuple(mixture) or None

    @field_validator("offload_blocks")
    @classmethod
    def _blocks_are_not_negative(cls, number: int | str) -> int | str:
        if isinstance(number, int) and number < 0:
            raise ValueError("a number of blocks is at least 0")
        return number

    @property
    def is_open(self) -> bool:
        """Whether the mixture of a budget is still to be chosen for a device's memory."""
        return self.policy == "budget" and self.mixture is None

    @property
    def has_open_blocks(self) -> bool:
        """Whether the number of blocks whose saved tensors leave is still to be chosen."""
        return self.offload_blocks == "auto"

    @property
    def may_be_full(self) -> bool:
        """Whether some block is recomputed fully, or may be once a mixture is chosen."""
        return self.policy == "full" or (self.policy == "budget" and (self.mixture is None or self.mixture[0] > 0))

    @property
    def is_selective(self) -> bool:
        """Whether some block is recomputed selectively."""
        return self.policy == "selective" or (self.mixture is not None and self.mixture[1] > 0)


class Offload(Section):
    optimizer: Literal["none", "cpu", "nvme"] = Field(
        default="none",
        description="where the optimizer's moments are kept: none (the device) | cpu (pinned memory of the host) | "
        "nvme (files in offload.folder)",
    )
    parameters: Literal["none", "cpu"] = Field(
        default="none", description="where the shards of parameters are kept: none (the device) | cpu"
    )
    update: Literal["auto", "device", "host"] = Field(
        default="auto",
        description="where the optimizer updates offloaded states: device (they stream through it) | host | auto (the "
        "faster one on the given machine)",
    )
    masters: Literal["device", "host"] = Field(
        default="device",
        description="where float32 masters of 16-bit weights are kept: device (the weights at rest) | host (with the "
        "moments; weights rest in 16 bits). Masters are never on the device with optimizer = nvme or parameters = cpu",
    )
    chunk_elements: int | None = Field(
        default=None,
        ge=1024,
        description="elements of a chunk of states, of which three are in flight; absent: 2^24",
    )
    staging_bytes: int = Field(
        default=0,
        ge=0,
        description="device memory for states on their way, so that their copies hide behind several micro-batches",
    )
    delayed: bool = Field(
        default=False,
        description="the update of a step runs beside the next step and lands after it: other mathematics",
    )
    folder: str = Field(default="", description="nvme: a folder of a local disk; absent: offload/ of the run folder")
    durable: Literal["checkpoint", "step"] = Field(
        default="checkpoint",
        description="nvme: what survives a crash: checkpoint | step (every step; twice the space of the disk)",
    )
