"""Pins: what they protect, whatever comes first, the pin or the chunk."""

from cpu_prefix_cache.index.forest import Forest


def forest_of(*paths):
    """A forest of chunks that are named by their blocks: each of `paths` hangs below the chunk it begins with."""
    forest = Forest(8)
    for parent, *run in paths:
        forest.insert_run(run, [bytes([block]) * 16 for block in run], parent)
    return forest


def test_a_pin_protects_what_is_above_it():
    forest = forest_of([8, 0, 1, 2], [1, 3])
    forest.pin(3)
    assert forest.pins.protected() == {0, 1, 3} and list(forest.pins) == [3]
    assert forest.pins.protected_among([0, 2]) == {0}


def test_two_pins_on_a_node_end_one_by_one():
    forest = forest_of([8, 0])
    forest.pin(0)
    forest.pin(0)
    forest.pins.remove(0)
    assert forest.pins.count(0) == 1 and forest.pins.protected_among([0]) == {0}
    forest.pins.remove(0)
    assert 0 not in forest.pins and not forest.pins.protected_among([0])


def test_a_pin_on_what_is_being_written_protects_from_when_it_is_linked():
    forest = forest_of([8, 0])
    forest.pin(1)
    assert forest.pins.protected() == set() == forest.pins.linked
    forest.insert_run([1], [b"1" * 16], 0)
    assert forest.pins.protected() == {0, 1} and forest.pins.linked == {1}
    forest.check_valid()


def test_a_pin_on_what_was_withdrawn_protects_what_is_above():
    forest = forest_of([8, 0, 1])
    forest.pin(1)
    assert forest.pins.protected() == {0, 1}
    forest.withdraw(1)
    assert forest.pins.protected() == {0}
    forest.check_valid()


def test_children_are_those_that_are_left():
    forest = forest_of([8, 0], [0, 1], [0, 2], [0, 3])
    assert list(forest.children(0)) == [1, 2, 3]
    for gone, left in ((2, [1, 3]), (1, [3]), (3, [])):
        forest.remove_run([gone])
        assert list(forest.children(0)) == left
        forest.check_valid()
