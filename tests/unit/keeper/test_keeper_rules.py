"""The model of `benchmarks/deciding/keeper_rules.py`: four orders in which chunks leave a node's pool."""

import random

import pytest

from benchmarks.deciding.keeper_engines import EVEN_DEPTH, new_keeper, saved
from benchmarks.deciding.keeper_rules import Node, at_random, by_prefix, replay
from cpu_prefix_cache.model.hashing import ChainHasher
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest

TOKENS = 512  # of a block


def keys_of(prompt):
    """A key for each letter."""
    return ChainHasher(1, "sha256").keys([*map(ord, prompt)])


def a_trace(requests=300):
    """Conversations that go on: each prompt is the beginning of an earlier one, and some more."""
    draw, prompts, letters = random.Random(4), [""], iter(map(chr, range(1000, 9000)))
    for _ in range(requests):
        before = draw.choice(prompts[-20:])
        prompts.append(
            before[: draw.randint(0, len(before))] + "".join(next(letters) for _ in range(draw.randint(1, 5)))
        )
    made = [TraceRequest(at, keys_of(prompt), TOKENS * len(prompt)) for at, prompt in enumerate(prompts[1:])]
    return Trace(paths=[], block_tokens=TOKENS, requests=made)


@pytest.mark.parametrize("capacity", [20, 60, 200])
def test_without_devices_it_saves_what_the_keeper_saves(capacity):
    trace = a_trace()
    model = replay(trace, Node(capacity, 2, 0, "lru"), at_random(random.Random(1)), EVEN_DEPTH)
    keeper = saved(trace, [new_keeper(capacity)], 1, 0, random.Random(1)).share_of(trace.work, EVEN_DEPTH)
    assert 0 < model["saved"] == keeper < 1


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        ("lru", "cdefgh"),
        ("held", "abefgh"),  # d, which the first engine holds, went for g, and c, which two hold, for h
        ("held alone", "abcefh"),  # and g, which the second one holds alone, for h
    ],
)
def test_chunks_that_devices_hold_leave_first(rule, left):
    node = Node(6, 3, 2, rule)
    for engine, letters in ((0, "abcd"), (2, "c"), (1, "efgh")):
        for letter in letters:
            node.serve(engine, keys_of(letter))
    assert "".join(letter for letter in "abcdefgh" if keys_of(letter)[0] in node.pool) == left


@pytest.mark.parametrize(("rule", "left"), [("lru", "bcd"), ("returned", "acd")])
def test_a_chunk_that_leaves_a_device_becomes_the_youngest(rule, left):
    node = Node(3, 2, 1, rule)
    for engine, letter in ((0, "a"), (1, "b"), (1, "c"), (0, "d")):
        node.serve(engine, keys_of(letter))
    assert "".join(letter for letter in "abcd" if keys_of(letter)[0] in node.pool) == left


@pytest.mark.parametrize(("engine", "found"), [(0, 1), (1, 0)])
def test_a_chunk_that_left_the_pool_is_found_on_its_device_alone(engine, found):
    node = Node(2, 2, 2, "held")
    for letter in "abc":
        node.serve(0, keys_of(letter))
    (gone,) = [letter for letter in "bc" if keys_of(letter)[0] not in node.pool]
    assert node.serve(engine, keys_of(gone)) == found


def test_a_prompt_goes_to_the_device_that_has_most_of_it():
    node, route = Node(20, 4, 10, "lru"), by_prefix(random.Random(1))
    node.serve(2, keys_of("abc"))
    node.serve(1, keys_of("ab"))
    assert {route(node, keys_of("abcd")) for _ in range(20)} == {2}
    assert {route(node, keys_of("xyz")) for _ in range(100)} == {0, 1, 2, 3}
