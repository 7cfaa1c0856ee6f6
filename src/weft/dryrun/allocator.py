"""Simulation of CUDA's caching allocator: the memory it reserves for a trace of allocations. No device, no torch.

It replays events and tracks nothing. Reserved exceeds allocated because blocks are split from segments that are kept
until the device is full. The rules (c10/cuda/CUDACachingAllocator.cpp, torch 2.11 to 2.13, default options):

    size      rounded up to 512 B; up to 1 MiB goes to the small pool, the rest to the large; each stream has its own
    classic   segments of 2 MiB (small), 20 MiB (below 10 MiB), else the size rounded up to 2 MiB
    growing   expandable_segments: one segment per pool, mapped further by granules of 2 MiB (small) or 20 MiB (large)
    search    the smallest free block that is large enough, the lowest address among equals; a block at the growing end
              counts with the size it could grow to, so larger inner blocks win
    split     the rest stays a block if it has 512 B (small, growing) or more than 1 MiB (large, classic)
    free      a block merges with its free neighbours
    full      free segments (classic) or free granules (growing) are returned to the device, then one retry

Not modelled: frees that wait for another stream (`record_stream`), CUDA graphs, other PYTORCH_CUDA_ALLOC_CONF options.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIB = 2**20
ROUNDING_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB  # a request of at least this size gets its own segment
SEGMENT_ROUNDING_BYTES = 2 * MIB
ADDRESSES = LARGE_SEGMENT_BYTES * 2**30  # a segment's address space: larger than any device, a multiple of granules


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """`nbytes` > 0 allocates under `key` (a live key: the new block is taken before the old one is freed), 0 frees."""

    key: int
    nbytes: int
    stream: int = 0


@dataclass(frozen=True, kw_only=True)
class Reserved:
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    out_of_memory: bool = False  # the trace did not fit `capacity_bytes`; the replay stopped there


def simulate(
    events: Iterable[AllocatorEvent], *, expandable_segments: bool, capacity_bytes: int | None = None
) -> Reserved:
    """Replay `events`. `capacity_bytes` limits the allocator's memory; None: no limit."""
    allocator = _Allocator(expandable=expandable_segments, capacity_bytes=capacity_bytes)
    for event in events:
        if not event.nbytes:
            allocator.free(event.key)
        elif not allocator.allocate(event.key, event.nbytes, event.stream):
            return allocator.result(out_of_memory=True)
    return allocator.result(out_of_memory=False)


def least_capacity(events: Sequence[AllocatorEvent], *, expandable_segments: bool) -> int:
    """The smallest capacity on which the trace completes, returning cached memory to the device on the way.

    Found by bisection between allocated and reserved, to a 64th of their difference.
    """
    free = simulate(events, expandable_segments=expandable_segments)
    low, high = free.peak_allocated_bytes, free.peak_reserved_bytes
    for _ in range(6):
        middle = (low + high) // 2
        is_full = simulate(events, expandable_segments=expandable_segments, capacity_bytes=middle).out_of_memory
        low, high = (middle, high) if is_full else (low, middle)
    return high


class _Block:
    """A span of a segment. `is_mapped` is false where a growing segment has addresses but no memory."""

    __slots__ = ("address", "is_free", "is_mapped", "next", "pool", "prev", "size")

    def __init__(self, pool: _Pool, address: int, size: int, *, is_mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.is_mapped = pool, address, size, is_mapped
        self.is_free = True
        self.prev: _Block | None = None
        self.next: _Block | None = None

    @property
    def reach(self) -> int:
        """Its size plus that of the unmapped span it could grow into."""
        after = self.next
        return self.size if after is None or after.is_mapped else self.size + after.size

    def split(self, size: int) -> _Block:
        """Keep the first `size` bytes; return the rest, linked behind, free and in no list."""
        rest = _Block(self.pool, self.address + size, self.size - size, is_mapped=self.is_mapped)
        rest.prev, rest.next = self, self.next
        if rest.next is not None:
            rest.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def swallow(self, after: _Block) -> None:
        """Merge with the block behind this one."""
        self.size += after.size
        self.next = after.next
        if self.next is not None:
            self.next.prev = self


class _Pool:
    """Free blocks of one stream and size class. `free` is sorted by (size, address), `unmapped` by address."""

    __slots__ = ("free", "granule", "is_small", "unmapped")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.granule = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self.free: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = []

    def add(self, block: _Block) -> None:
        if block.is_mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: _Block) -> None:
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def take(self, size: int, *, by_reach: bool) -> _Block | None:
        """Remove and return the best fit."""
        free = self.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        if by_reach:
            while index + 1 < len(free) and free[index + 1][2].reach < free[index][2].reach:
                index += 1
        return free.pop(index)[2]

    def merged(self, block: _Block) -> _Block:
        """`block` merged with its free neighbours of the same kind; the result is in no list."""
        before, after = block.prev, block.next
        if after is not None and after.is_free and after.is_mapped == block.is_mapped:
            self.remove(after)
            block.swallow(after)
        if before is not None and before.is_free and before.is_mapped == block.is_mapped:
            self.remove(before)
            before.swallow(block)
            return before
        return block


class _Allocator:
    def __init__(self, *, expandable: bool, capacity_bytes: int | None) -> None:
        self._expandable, self._capacity_bytes = expandable, capacity_bytes
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._live: dict[int, _Block] = {}
        self._next_address = 0
        self._reserved = self._peak_reserved = 0
        self._allocated = self._peak_allocated = 0

    def allocate(self, key: int, nbytes: int, stream: int) -> bool:
        size = -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES
        pool = self._pool(stream, is_small=size <= SMALL_BYTES)
        block = pool.take(size, by_reach=self._expandable) or self._reserve(pool, size)
        if block is None:
            self._release_cached()
            block = self._reserve(pool, size)
        if block is None:
            return False
        rest = block.size - size
        if rest >= ROUNDING_BYTES if pool.is_small or self._expandable else rest > SMALL_BYTES:
            pool.add(block.split(size))
        block.is_free = False
        self._count(block.size)
        self.free(key)
        self._live[key] = block
        return True

    def free(self, key: int) -> None:
        """Free a block. A key that is not live is ignored: a storage of zero bytes never had a block."""
        block = self._live.pop(key, None)
        if block is None:
            return
        self._allocated -= block.size
        block.is_free = True
        block.pool.add(block.pool.merged(block))

    def result(self, *, out_of_memory: bool) -> Reserved:
        return Reserved(
            peak_reserved_bytes=self._peak_reserved,
            peak_allocated_bytes=self._peak_allocated,
            out_of_memory=out_of_memory,
        )

    def _pool(self, stream: int, *, is_small: bool) -> _Pool:
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = _Pool(is_small=is_small)
        return pool

    def _count(self, nbytes: int) -> None:
        self._allocated += nbytes
        self._peak_allocated = max(self._peak_allocated, self._allocated)
        self._peak_reserved = max(self._peak_reserved, self._reserved)

    # --- memory of the device -----------------------------------------------------------------------------------

    def _reserve(self, pool: _Pool, size: int) -> _Block | None:
        """A free block of at least `size` from the device, in no list; None if the device is full."""
        return self._grow(pool, size) if self._expandable else self._new_segment(pool, size)

    def _obtain(self, nbytes: int) -> bool:
        if self._capacity_bytes is not None and self._reserved + nbytes > self._capacity_bytes:
            return False
        self._reserved += nbytes
        return True

    def _new_segment(self, pool: _Pool, size: int) -> _Block | None:
        nbytes = segment_bytes(size)
        return _Block(pool, self._new_addresses(), nbytes) if self._obtain(nbytes) else None

    def _new_addresses(self) -> int:
        self._next_address += ADDRESSES
        return self._next_address

    def _grow(self, pool: _Pool, size: int) -> _Block | None:
        block = self._where_to_grow(pool, size)
        if block.is_mapped:
            pool.remove(block)
        else:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            after = block.next
            if after is None or (mapped := self._map(after, min(size - block.size, after.size))) is None:
                pool.add(block)
                return None
            block.swallow(mapped)
        return block

    def _where_to_grow(self, pool: _Pool, size: int) -> _Block:
        """The lowest unmapped span with room, or the free block before it."""
        for _, unmapped in pool.unmapped:
            before = unmapped.prev
            start = before if before is not None and before.is_free else unmapped
            if _has_room(start, size):
                return start
        fresh = _Block(pool, self._new_addresses(), ADDRESSES, is_mapped=False)
        pool.add(fresh)
        return fresh

    def _map(self, block: _Block, nbytes: int) -> _Block | None:
        """Map the first `nbytes` (rounded up to granules) of an unmapped span; the block is then in no list."""
        pool = block.pool
        needed = -(-nbytes // pool.granule) * pool.granule
        if not self._obtain(needed):
            return None
        pool.remove(block)
        if block.size > needed:
            pool.add(block.split(needed))
        block.is_mapped = True
        after = block.next
        if after is not None and after.is_free and after.is_mapped:
            pool.remove(after)
            block.swallow(after)
        return block

    def _release_cached(self) -> None:
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self._expandable:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    pool.remove(block)
                    self._reserved -= block.size

    def _unmap(self, block: _Block) -> None:
        """Return the granules that lie entirely inside a free block to the device."""
        pool, granule = block.pool, block.pool.granule
        begin = -(-block.address // granule) * granule
        end = (block.address + block.size) // granule * granule
        if begin >= end:
            return
        pool.remove(block)
        middle = block
        if begin > block.address:
            middle = block.split(begin - block.address)
            pool.add(block)
        if middle.size > end - begin:
            pool.add(middle.split(end - begin))
        middle.is_mapped = False
        self._reserved -= middle.size
        pool.add(pool.merged(middle))


def segment_bytes(size: int) -> int:
    """Size of a classic segment for a block of `size`."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


def _has_room(block: _Block | None, size: int) -> bool:
    room = 0
    while block is not None and block.is_free and room < size:
        room += block.size
        block = block.next
    return room >= size
