"""The kind of use that a request makes of each segment of its prompt: its *class*, of three features or by its hint.

    turn    how many prompts had ended above its last segment: the turn of a conversation
    role    of the segment: several segments have begun below it, and how many; or it was passed; or it is the last one,
            and then whether this prompt came before, whether it continues a conversation, or branches off a document
    gap     how long the segment had waited when it was used before, if it is shared; else how long the last one had
    hint    the bin of ages (survival.py) in which the request is to be followed by the next one, or that none follows

A hint is in place of the three, for what no other prompt has continued differently: what many share does not take the
hint of one of them. So hints have classes of their own, and what those turn out to be worth is what hints are worth.

The idea that they predict which conversations go on, and when, is from "KVCache in the wild" (USENIX ATC '25); gaps
serve agents, whose tools take their time.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

from cpu_prefix_cache.eviction.segments import Segment
from cpu_prefix_cache.eviction.survival import BINS, EDGES

TURNS, ROLES, GAPS = 6, 10, 6
FEATURES = [(turn, role, gap) for turn in range(TURNS) for role in range(ROLES) for gap in range(GAPS)]  # by class
HINTED = {len(FEATURES) + bin: bin for bin in range(BINS + 1)}  # the bin of each class of a hint; the last one: never
FEATURES += [(TURNS, ROLES, GAPS)] * len(HINTED)
TURN_OF = (0, 0, 1, 2, 2, *[3] * 6, *[4] * 20, 5)  # turn 1 | 2 | 3 to 4 | 5 to 10 | 11 to 30 | 31 and more
SHARED_OF = (0, 0, 2, 4, 4, 4, 5)  # by 2 | 3 to 5 | 6 and more segments
REPEATED_OF = (0, 0, 6, 7, 7, *[8] * 6, 9)  # the prompt comes for the 2nd time | 3rd to 4th | 5th to 10th | after that
MOST_TURNS, MOST_SHARES, MOST_REPEATS = len(TURN_OF) - 1, len(SHARED_OF) - 1, len(REPEATED_OF) - 1
CONTINUES, PASSED, DOCUMENT = 0, 1, 3
DOCUMENT_CHUNKS = 2  # a first turn that shares as many with others has something to branch off
GAP_OF = (1, 2, 3, 4, *[5] * (BINS - 4))  # by bin, and so by seconds: up to 2 | 8 | 32 | 64 | more. 0: not used before
UNKNOWN = FEATURES.index((0, CONTINUES, 0))
FIRST_HINTED = min(HINTED)


def kinds_of(path: Sequence[Segment], matched: int, next_use: float | None = None) -> list[int]:
    """The class that a prompt gives each of its segments, in their order. `matched` chunks were known, and `next_use`
    is in seconds.
    """
    last = path[-1]
    turn = TURN_OF[min(last.turn, MOST_TURNS)]
    alone = DOCUMENT if last.turn == 1 and matched >= DOCUMENT_CHUNKS else CONTINUES
    own = REPEATED_OF[min(last.ended, MOST_REPEATS)] or alone
    kinds: list[int] = []
    for segment in path:
        role, gap = SHARED_OF[min(segment.children, MOST_SHARES)], segment.gap
        if not role:
            role, gap = own if segment is last else PASSED, last.gap
        kinds.append((turn * ROLES + role) * GAPS + gap)
    if next_use is None:
        return kinds
    hinted = class_of_hint(next_use)
    return [kind if segment.children > 1 else hinted for segment, kind in zip(path, kinds, strict=True)]


def class_of_hint(next_use: float) -> int:
    """The class of what is to be used again in so many seconds; infinity: never."""
    return FIRST_HINTED + (BINS if next_use == inf else min(bisect_right(EDGES, next_use), BINS) - 1)
