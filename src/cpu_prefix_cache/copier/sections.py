"""The sections of a piece: runs of its parts that a load brings one after the other, each for all blocks.

    piece   | layer 0 | layer 1 | layer 2 | layer 3 | layer 4 | layer 5 |
            '----- section 0 ---'---- section 1 ----'---- section 2 ----'

Parts are in the order of layers. Compute may read a layer as soon as the section of its last part has come, while the
link is busy with the next ones.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from cpu_prefix_cache.copier.binding import BoundGroup

SECTION_BYTES = 256 * 1024  # of a piece, at least; fragments of half of that still cross at the link's speed (one H200)
MOST_SECTIONS = 32  # compute waits for the first: with 8 SGLang served 3 % less (one H200)
LOAD_BYTES = 8 << 20  # of a load, at least, that come with one event: each costs the host what 3 MiB take on the link


def numbers_of(sections: Sequence[BoundGroup]) -> list[int]:
    """For each part of a group the number of its section."""
    return [at for at, section in enumerate(sections) for _ in section.parts]


def in_sections(group: BoundGroup) -> list[BoundGroup]:
    """The group's parts section by section, each with its offsets in the whole piece."""
    begin, end = group.offsets[0], group.offsets[-1]
    count = max(1, min(MOST_SECTIONS, (end - begin) // SECTION_BYTES))
    firsts, least = [0], (end - begin) / count
    for at, offset in enumerate(group.offsets):
        if min(offset - group.offsets[firsts[-1]], end - offset) >= least:
            firsts.append(at)
    return [group.run(first, last) for first, last in pairwise([*firsts, len(group.parts)])]


def together(count: int, num_bytes: int) -> Iterator[range]:
    """The `count` sections of a load of `num_bytes` bytes, in runs that come with one event."""
    step = min(count, -(-count * LOAD_BYTES // max(1, num_bytes)))
    return (range(first, min(first + step, count)) for first in range(0, count, step))
