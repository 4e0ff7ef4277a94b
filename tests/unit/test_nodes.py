"""The nodes of a pool: their names, and how many blocks are in each state."""

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from cpu_prefix_cache.pool.nodes import Nodes
from cpu_prefix_cache.pool.shape import Beside, Shape
from cpu_prefix_cache.pool.states import ABSENT, CACHED, FREE, WRITING


def nodes_of(shape, numbers=0):
    forest = shape.new_forest(numbers)
    return forest, Nodes(forest, shape)


def test_numbers_begin_beyond_the_root_and_are_used_again():
    forest, nodes = nodes_of(Shape(2))
    first, second = nodes.new_numbers(2)
    assert {first, second} == {forest.root + 1, forest.root + 2}
    nodes.put_back([first, 0])  # block 0 is no number
    assert nodes.new_numbers(2) == [first, forest.root + 3]
    assert len(nodes.state) == len(forest.key)


def test_numbers_that_outlived_a_reset_are_not_given_again():
    _, before = nodes_of(Shape(2), numbers=2)
    _, nodes = nodes_of(Shape(2), numbers=2)
    nodes.take_over(before, [3], set())
    assert nodes.new_numbers(2) == [4, 5]


def test_blocks_are_counted_by_the_state_of_their_nodes():
    _, nodes = nodes_of(Shape(4, blocks_per_chunk=2))
    nodes.chunks.give([0], [0, 3])
    nodes.move([0], FREE, WRITING)
    nodes.move([0], WRITING, CACHED)
    assert (nodes.count[WRITING], nodes.count[CACHED]) == (0, 2)
    assert nodes.remove([0], CACHED) == [0, 3] and nodes.count[CACHED] == 0


def test_a_checkpoint_counts_by_its_pieces():
    _, nodes = nodes_of(Shape(4, needs_checkpoint=lambda depth: True))
    (node,) = nodes.new_numbers(1)
    nodes.checkpoints.add(node, [PieceNeed("window", 2)])
    nodes.checkpoints.fill(node, [0, 1])
    nodes.move([node], WRITING, CACHED)
    assert nodes.count[CACHED] == 2
    assert nodes.remove([node], CACHED) == [0, 1] and node not in nodes.checkpoints


def test_a_chunk_with_a_key_is_cached_or_absent():
    forest, nodes = nodes_of(Shape(4, beside=Beside(2)))
    here, there = nodes.new_numbers(2)
    forest.insert_run([there, here], [b"a" * 16, b"b" * 16], forest.root)
    nodes.chunks.give([here], [0])
    nodes.move([here], FREE, CACHED)
    nodes.state[there] = ABSENT
    assert nodes.num_absent == 1
    nodes.state[here] = ABSENT
    assert nodes.empty([here], CACHED) == [0] and nodes.num_absent == 2


@pytest.mark.parametrize(("blocks", "per_chunk"), [(0, 1), (1, 2), (4, 0)])
def test_a_pool_that_holds_no_chunk_is_refused(blocks, per_chunk):
    with pytest.raises(ConfigurationError, match="a pool needs at least"):
        Shape(blocks, per_chunk)


def test_chunks_may_take_no_blocks_where_there_are_checkpoints():
    assert Shape(1, 0, needs_checkpoint=lambda depth: True).has_checkpoints
