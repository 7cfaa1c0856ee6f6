"""Random bits for stochastic rounding, from (seed, parameter's name, step, element of the full tensor) alone.

    bits(element) = mix(mix(low ^ word0) + high + word1)        32 bits; low and high are halves of the element's index

So a resumed run has the bits of the uninterrupted one, and every layout rounds an element alike. Over the elements of
one update the mixing is one to one: all values are equally frequent. The Triton kernel computes the same on a GPU;
here it is plain torch, in the lower half of 64-bit integers.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

LOW_HALF = 0xFFFFFFFF
# a mixing of 32 bits: shifts and odd factors, each invertible
SHIFTS, FACTORS = (16, 15, 16), (0x7FEB352D, 0x846CA68B)


def key_of(seed: int, name: str) -> int:
    """A parameter's key, below 2^63; from its name, since every pipeline stage numbers its parameters from zero."""
    return _digest(f"{seed}:{name}") >> 1


def words_of(key: int, step: int) -> tuple[int, int]:
    """The two 32-bit words of one update of one parameter."""
    mixed = _digest(f"{key}:{step}")
    return mixed & LOW_HALF, mixed >> 32


def random_bits(words: tuple[int, int], elements: Tensor) -> Tensor:
    """32 bits per element, given by its index in the full tensor (int64), as an int64 tensor."""
    mixed = _mix((elements & LOW_HALF) ^ words[0])
    return _mix((mixed + (elements >> 32) + words[1]) & LOW_HALF)


def for_second_moment(bits: Tensor) -> Tensor:
    return (bits & 0xFFFF).to(torch.int32)


def for_weight(bits: Tensor) -> Tensor:
    return (bits >> 16).to(torch.int32)


def round_with(values: Tensor, bits: Tensor) -> Tensor:
    """float32 `values` with only the upper 16 bits set: up or down with probabilities that keep the mean, by `bits`."""
    raised = (values.view(torch.int32) + bits) & -(2**16)
    # the bits of some NaN would overflow into other numbers
    return torch.where(values.isnan(), values, raised.view(torch.float32))


def _mix(values: Tensor) -> Tensor:
    values = ((values ^ (values >> SHIFTS[0])) * FACTORS[0]) & LOW_HALF
    values = ((values ^ (values >> SHIFTS[1])) * FACTORS[1]) & LOW_HALF
    return values ^ (values >> SHIFTS[2])


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
