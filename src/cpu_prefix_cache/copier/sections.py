"""The sections of a piece: runs of layers that a load brings one after the other, each for all blocks.

    piece   | layer 0 | layer 1 | layer 2 | layer 3 | layer 4 | layer 5 |
            '----- section 0 ---'---- section 1 ----'---- section 2 ----'

Compute may read the layers of a section as soon as it has come, while the link is busy with the next ones.
"""

from cpu_prefix_cache.copier.binding import BoundGroup

SECTION_BYTES = 256 * 1024  # of a piece; fragments of half of that still cross at the speed of the link (one H200)
MOST_SECTIONS = 8  # the first delays compute by an eighth of the load


def in_sections(group: BoundGroup) -> list[BoundGroup]:
    """The group's parts section by section, each with its offsets in the whole piece."""
    begin, end = group.offsets[0], group.offsets[-1]
    count = max(1, min(MOST_SECTIONS, (end - begin) // SECTION_BYTES))
    sections, first = list[BoundGroup](), 0
    for last, offset in enumerate(group.offsets[1:], 1):
        if (offset - begin) * count >= (end - begin) * (len(sections) + 1):
            sections.append(BoundGroup(group.piece, group.parts[first:last], group.offsets[first : last + 1]))
            first = last
    return sections
