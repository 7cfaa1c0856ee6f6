"""A 64-bit checksum at memory speed: zlib's CRC-32 would cost a third of a push.

Four lanes of multiply and rotate over 8-byte words. It detects torn and stale data; it is not cryptographic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.server.table.compiled import compiled


@compiled
def _mix(words: NDArray[np.uint64], seed: np.uint64) -> np.uint64:
    multiplier, other = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
    a, b, c, d = seed, seed ^ multiplier, seed ^ other, ~seed
    left, right, whole = np.uint64(31), np.uint64(33), words.size // 4 * 4
    for i in range(0, whole, 4):
        a = (a ^ words[i]) * multiplier
        b = (b ^ words[i + 1]) * multiplier
        c = (c ^ words[i + 2]) * multiplier
        d = (d ^ words[i + 3]) * multiplier
        a = (a << left) | (a >> right)
        b = (b << left) | (b >> right)
        c = (c << left) | (c >> right)
        d = (d << left) | (d >> right)
    for i in range(whole, words.size):
        a = (a ^ words[i]) * other
        a ^= a >> right
    total = (a * multiplier) ^ (b * other) ^ ((c << left) * multiplier) ^ ((d >> left) + d * other)
    total ^= total >> right
    return total * other


def checksum(parts: list[Any], *, seed: int = 0) -> int:
    """The checksum of all buffers, in order."""
    found = np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)
    for part in parts:
        raw = np.frombuffer(part, np.uint8)
        whole = raw.size // 8 * 8
        found = np.uint64(_mix(raw[:whole].view(np.uint64), found))
        if whole < raw.size:
            tail = np.zeros(8, np.uint8)
            tail[: raw.size - whole] = raw[whole:]
            found = np.uint64(_mix(tail.view(np.uint64), found))
    return int(found)
