"""An engine with an index of its own puts blocks by keys, looks them up and loads them: stories with real bytes."""

import pytest

from cpu_prefix_cache.testing import CorruptingCopier
from tests.support.keyed_engine import GROUPS, KeyedEngine, keys

PROMPT = keys(*range(6))
ALL = [[0, 1, 2, 3, 4, 5], [4, 5], [1]]  # attention of six keys, the window's of the last two, a state of the last
ELSEWHERE = [[16, 15, 14, 13, 12, 11], [8, 7], [9]]


def test_blocks_come_back_by_their_keys():
    engine = KeyedEngine()
    engine.put(PROMPT, ALL)
    found = engine.host.lookup(PROMPT)
    assert found.lengths == [6] and found.longest == 6
    assert engine.loaded(PROMPT, ELSEWHERE)
    engine.host.release(found)
    engine.host.cache.check_valid()


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_a_damaged_block_of_any_group_is_seen(group):
    """The control of all stories here."""
    engine = KeyedEngine(wrap_copier=lambda copier, tensors: CorruptingCopier(copier, tensors, group))
    engine.put(PROMPT, ALL)
    assert engine.host.load(PROMPT, ELSEWHERE).wait()
    assert {name for name, _ in engine.wrong(PROMPT, ELSEWHERE)} == {GROUPS[group]}
