"""The kind of use that each segment of a prompt gets: (turn, role, gap), or its hint, worked by hand."""

from math import inf

import pytest

from cpu_prefix_cache.eviction.kinds import CONTINUES, DOCUMENT, FEATURES, HINTED, PASSED
from cpu_prefix_cache.eviction.survival import BINS
from property_tests.strategies import chain
from tests.support.story import Shelf

SHARED_BY_TWO, SECOND_TIME = 2, 6


@pytest.fixture
def shelf():
    return Shelf(100, policy="adaptive")


def kinds(shelf, prompt):
    """Segments of a prompt, in order: their last chunk, and their kind: if hinted, the bin."""
    marks = shelf.pool._policy._mark
    segments = dict.fromkeys(marks[shelf.pool.find(key)] for key in chain(prompt))
    return {segment.last.decode()[-1]: HINTED.get(segment.kind, FEATURES[segment.kind]) for segment in segments}


def test_a_first_prompt(shelf):
    shelf.put("ab")
    assert kinds(shelf, "ab") == {"b": (0, CONTINUES, 0)}


def test_a_conversation_goes_on(shelf):
    """The second turn, 5 seconds after the first: what went before was passed."""
    shelf.put("ab")
    shelf.put("abcd", after=5.0)
    assert kinds(shelf, "abcd") == {"b": (1, PASSED, 2), "d": (1, CONTINUES, 2)}
    shelf.put("abcdef", after=40.0)
    assert kinds(shelf, "abcdef") == {"b": (2, PASSED, 4), "d": (2, PASSED, 4), "f": (2, CONTINUES, 4)}


def test_a_conversation_goes_on_in_two_ways(shelf):
    """The chunks that both share have waited 40 seconds, by their own clock; a third way comes much later."""
    shelf.put("ab")
    shelf.put("abcd", after=5.0)
    shelf.put("abxy", after=40.0)
    assert kinds(shelf, "abxy") == {"b": (1, SHARED_BY_TWO, 4), "y": (1, CONTINUES, 4)}
    shelf.put("abcde", after=100.0)
    assert kinds(shelf, "abcde") == {"b": (2, SHARED_BY_TWO, 5), "d": (2, PASSED, 5), "e": (2, CONTINUES, 5)}


def test_two_questions_share_a_document(shelf):
    """No prompt ended where they part, so both are first turns."""
    shelf.put("pqrst")
    shelf.put("pqruv", after=1.0)
    assert kinds(shelf, "pqruv") == {"r": (0, SHARED_BY_TWO, 1), "v": (0, DOCUMENT, 0)}


def test_a_role_is_that_of_how_many_share_a_segment(shelf):
    """Two; three to five; six and more."""
    shelf.put("pqA")
    roles = []
    for end in "BCDEFGH":
        shelf.put("pq" + end)
        roles.append(kinds(shelf, "pq" + end)["q"][1])
    assert roles == [2, 4, 4, 4, 5, 5, 5]


def test_the_same_prompt_comes_again(shelf):
    shelf.put("ab")
    shelf.put("ab", after=9.0)
    assert kinds(shelf, "ab") == {"b": (0, SECOND_TIME, 3)}


@pytest.mark.parametrize("is_here", [True, False])
def test_a_turn_whose_last_chunk_was_cut_short(shelf, is_here):
    """The answer filled it up, so it came back as another chunk. It is the second turn, even if nothing is here."""
    shelf.put("abcdX")
    if not is_here:
        shelf.pool.reset()
    shelf.put("abcdyz", after=9.0)
    assert kinds(shelf, "abcdyz") == {"d": (1, SHARED_BY_TWO, 3), "z": (1, CONTINUES, 3)}


@pytest.mark.parametrize("portion", [1, 3])
def test_a_turn_whose_computed_answer_was_cut_short(shelf, portion):
    """The chunks of the answer came while it was computed, and no prompt had had them. Nothing is here any more."""
    shelf.put("ab")
    pool, keys = shelf.pool, chain("abcdX")
    touch = pool.touch(pool.find(keys[1]), keys[:2], shelf.now)
    for at in range(2, 5, portion):
        new = keys[at : at + portion]
        pool.commit(pool.allocate(len(new)), new, pool.find(keys[at - 1]), touch)
    pool.reset()
    shelf.put("abcdyz", after=9.0)
    assert list(kinds(shelf, "abcdyz")) == ["d", "z"]


def test_a_prompt_that_comes_often_changes_its_class_at_the_3rd_the_5th_and_the_11th_time(shelf):
    classes = []
    for _ in range(12):
        shelf.put("ab", after=9.0)
        classes.append(kinds(shelf, "ab")["b"][1])
    assert classes == [CONTINUES, SECOND_TIME, *[7] * 2, *[8] * 6, *[9] * 2]


def test_a_hint_is_the_kind_of_all_that_a_conversation_had_alone(shelf):
    """The last hint counts, and a turn without one has a kind as ever."""
    shelf.put("ab", next_use=40.0)
    assert kinds(shelf, "ab") == {"b": 3}
    shelf.put("abcd", after=5.0, next_use=1.0)
    assert kinds(shelf, "abcd") == {"b": 0, "d": 0}
    shelf.put("abcdef", after=5.0)
    assert kinds(shelf, "abcdef") == {"b": (2, PASSED, 2), "d": (2, PASSED, 2), "f": (2, CONTINUES, 2)}


def test_shared_chunks_do_not_take_the_hint_of_one_prompt(shelf):
    shelf.put("pqrst", next_use=30.0)
    shelf.put("pqruv", after=1.0, next_use=inf)
    assert kinds(shelf, "pqruv") == {"r": (0, SHARED_BY_TWO, 1), "v": BINS}
    assert kinds(shelf, "pqrst") == {"r": (0, SHARED_BY_TWO, 1), "t": 2}


@pytest.mark.parametrize(("next_use", "bin"), [(0.0, 0), (1.9, 0), (2.0, 1), (130, 5), (6e4, 17), (1e9, 17), (inf, 18)])
def test_a_hint_has_the_bin_of_its_seconds(shelf, next_use, bin):
    shelf.put("ab", next_use=next_use)
    assert kinds(shelf, "ab") == {"b": bin}
