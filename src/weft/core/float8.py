"""The rule for linear layers that multiply in float8, shared by planner and engine. No torch.

Quantising costs passes over the operands, so float8 pays only for large enough matmuls: with many rows M, inputs K and
outputs N, a matmul costs M K N and the passes M (K + N), so the criterion is 1 / (1/K + 1/N).
Measured on an H200, break-even is between 1024 (2048 x 2048: 0.6 of the speed of bf16) and 1638 (2048 x 8192: 1.15).
"""

from __future__ import annotations

from weft.core.float8_section import Float8Choice, Float8Recipe

WORTH_IT = 1300.0  # least 1 / (1/K + 1/N)
DIVISOR = 16  # the hardware's requirement on every dimension
BLOCKS: dict[Float8Recipe, int] = {
    "blockwise": 128,
    "mxfp8": 32,
    "nvfp4": 16,
}  # elements of a row with one scale, in recipes of blocks


def takes_float8(in_features: int, out_features: int, choice: Float8Choice) -> bool:
    if choice == "none" or in_features % DIVISOR or out_features % DIVISOR:
        return False
    return choice == "all" or 1 / (1 / in_features + 1 / out_features) >= WORTH_IT
