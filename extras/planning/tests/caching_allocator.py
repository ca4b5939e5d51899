"""A model of torch's caching allocator: what it takes of a GPU for the memory that a program asks for and gives back.

The rules are those of c10/cuda/CUDACachingAllocator.cpp, for one stream, without expandable segments. Sizes are
rounded, a free block that is too large is split, free neighbours are joined, and no segment is given back.
"""

import bisect
from dataclasses import dataclass

ROUNDING, SMALL, SMALL_SEGMENT = 512, 1 << 20, 2 << 20
"""Bytes: kMinBlockSize, kSmallSize and kSmallBuffer there."""
LARGE, LARGE_SEGMENT, LARGE_ROUNDING = 10 << 20, 20 << 20, 2 << 20
"""Bytes: kMinLargeAlloc, kLargeBuffer and kRoundLarge there."""


@dataclass(eq=False)
class Block:
    """A part of a segment, and those beside it there."""

    address: int
    size: int
    is_small: bool
    """Whether the segment is one for small blocks."""
    before: "Block | None" = None
    after: "Block | None" = None
    is_free: bool = False


class CachingAllocator:
    """Counts bytes: `used` and the most of that, `peak`, both as asked for; and `reserved`, that of all segments."""

    def __init__(self):
        self.used = self.peak = self.reserved = 0
        self._free = {
            True: [],
            False: [],
        }  # small blocks and large ones, each (size, address, block), sorted
        self._held = {}  # what is asked for -> its bytes and block

    def set_size(self, name: int, num_bytes: int) -> None:
        """Give a name memory of so many bytes, in place of what it has; none for 0."""
        old_bytes, block = self._held.pop(name, (0, None))
        if block is not None:
            self._give_back(block)
        if num_bytes:
            self._held[name] = num_bytes, self._take(num_bytes)
        self.used += num_bytes - old_bytes
        self.peak = max(self.peak, self.used)

    def _take(self, num_bytes: int) -> Block:
        size = _rounded(num_bytes, ROUNDING)
        is_small = size <= SMALL
        free = self._free[is_small]
        index = bisect.bisect_left(free, (size,))
        block = free.pop(index)[2] if index < len(free) else self._new_segment(size)
        block.is_free = False
        rest = block.size - size
        if rest >= ROUNDING if is_small else rest > SMALL:
            left = Block(block.address + size, rest, is_small, block, block.after)
            if left.after is not None:
                left.after.before = left
            block.size, block.after = size, left
            self._set_free(left)
        return block

    def _new_segment(self, size: int) -> Block:
        if size <= SMALL:
            num_bytes = SMALL_SEGMENT
        else:
            num_bytes = LARGE_SEGMENT if size < LARGE else _rounded(size, LARGE_ROUNDING)
        self.reserved += num_bytes
        return Block(self.reserved - num_bytes, num_bytes, size <= SMALL)

    def _give_back(self, block: Block) -> None:
        if block.before is not None and block.before.is_free:
            block = self._join(self._take_out(block.before), block)
        if block.after is not None and block.after.is_free:
            block = self._join(block, self._take_out(block.after))
        self._set_free(block)

    def _join(self, first: Block, second: Block) -> Block:
        first.size, first.after = first.size + second.size, second.after
        if first.after is not None:
            first.after.before = first
        return first

    def _set_free(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.size, block.address, block))

    def _take_out(self, block: Block) -> Block:
        free = self._free[block.is_small]
        del free[bisect.bisect_left(free, (block.size, block.address))]
        return block


def _rounded(num_bytes: int, to: int) -> int:
    return -(-num_bytes // to) * to
