"""Nodes that a restart finds: whole ones, the youngest last, none of them split."""

import pytest

from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.messages.tier import Found
from cpu_prefix_cache.slab.scan import RestartScan
from tests.unit.slab.small_slab import BLOCK, PIECES, Letters, key_of, open_slab, page

CHUNK_SLOTS = 2  # of PIECES


class Story:
    """Nodes written in one session, and found in the next."""

    def __init__(self, path):
        self.path, self.slab = path, open_slab(path)
        self.first = self.slab.next_generation

    def write(self, slot, letter, generation, place=0, group=0, block=CHUNK):
        label = Label(key_of(letter), key_of("p"), group, place, block, self.first + generation)
        self.slab.write([slot], [page(letter.encode() * BLOCK)], [label])

    def chunk(self, letter, slots, generation):
        for place, slot in enumerate(slots):
            self.write(slot, letter, generation, place)

    def restart(self):
        self.slab.close()
        self.slab = open_slab(self.path)
        self.scan = RestartScan(self.slab, PIECES)
        self.scan.close()
        return self

    def portion(self, num_records=256):
        return [(chr(found.label.key[0]), found.slots) for found in self.scan.portion(num_records)]


@pytest.fixture
def story(tmp_path):
    made = Story(tmp_path)
    yield made
    made.slab.close()


def test_nothing_is_found_in_a_new_slab(story):
    assert story.restart().scan.is_over
    assert story.portion() == []


def test_chunks_are_found_in_the_order_of_their_generations(story):
    story.chunk("b", [0, 1], 2)
    story.chunk("c", [2, 3], 3)
    story.chunk("a", [5, 4], 1)
    assert story.restart().portion() == [("a", (5, 4)), ("b", (0, 1)), ("c", (2, 3))]
    assert story.scan.is_over


def test_a_found_node_has_the_label_of_its_first_slot(story):
    story.chunk("a", [5, 4], 1)
    (found,) = story.restart().scan.portion(256)
    assert found == Found(Label(key_of("a"), key_of("p"), 0, 0, CHUNK, story.first + 1), (5, 4))


def test_pieces_of_checkpoints_are_found_alone(story):
    story.write(1, "a", 1, group=1, block=0)
    story.write(2, "a", 2, group=1, block=1)
    for place, slot in enumerate((9, 7)):
        story.write(slot, "a", 3, place, group=2, block=0)
    assert story.restart().portion() == [("a", (1,)), ("a", (2,)), ("a", (9, 7))]


def test_a_node_that_has_lost_a_slot_is_dropped(story):
    story.chunk("a", [0], 1)
    story.write(2, "b", 2, place=1)
    story.write(3, "c", 3, place=0, group=2, block=0)
    story.chunk("d", [4, 5], 4)
    assert story.restart().portion() == [("d", (4, 5))]


def test_slots_that_make_no_node_of_these_pieces_are_dropped(story):
    story.write(0, "a", 1, group=0, block=0)  # a piece of a group that chunks have
    story.write(1, "b", 2, group=1)  # a chunk with a group of checkpoints
    story.write(2, "c", 3, group=9, block=0)
    story.chunk("d", [3, 4], 4)
    story.write(5, "d", 4, place=1)  # a place twice
    assert story.restart().portion() == []


def test_several_nodes_of_one_generation_are_distinguished(story):
    story.chunk("a", [0, 3], 1)
    story.chunk("b", [1, 2], 1)
    story.write(4, "a", 1, group=1, block=0)
    assert story.restart().portion() == [("a", (0, 3)), ("b", (1, 2)), ("a", (4,))]


@pytest.mark.parametrize("num_records", range(1, 12))
def test_no_node_is_split_between_portions(story, num_records):
    letters = "abcde"
    for at, letter in enumerate(letters):
        story.chunk(letter, [2 * at + 1, 2 * at], at)
    story.restart()
    found = []
    while not story.scan.is_over:
        portion = story.portion(num_records)
        assert len(portion) == min(-(-num_records // CHUNK_SLOTS), len(letters) - len(found))
        found += portion
    assert [letter for letter, _ in found] == list(letters)


def test_damaged_or_cleared_slots_are_not_found(tmp_path):
    letters = Letters(tmp_path)
    letters.put("ab")
    letters.damage(0, 50, "records", 128)
    letters.reopen(tmp_path)
    scan = RestartScan(letters.slab, PIECES)
    scan.close()
    assert scan.portion(256) == ()
    letters.slab.close()


def test_slots_below_the_floor_are_not_found(story):
    story.chunk("a", [0, 1], 1)
    story.chunk("b", [2, 3], 2)
    story.restart().slab.advance(story.first + 2)
    assert story.portion() == [("b", (2, 3))]


def test_a_reset_between_portions_counts(story):
    story.chunk("a", [0, 1], 1)
    story.chunk("b", [2, 3], 2)
    story.restart()
    assert story.portion(2) == [("a", (0, 1))]
    story.slab.advance(story.slab.next_generation)
    assert story.portion() == []


def test_slots_written_since_the_restart_are_not_found(story):
    story.chunk("a", [0, 1], 1)
    story.chunk("b", [2, 3], 2)
    story.restart()
    story.first = story.slab.next_generation
    story.chunk("c", [2, 3], 1)
    assert story.portion() == [("a", (0, 1))]


def test_a_scan_leaves_the_slab_as_it_was(story):
    story.chunk("a", [0, 1], 1)
    story.restart()
    story.portion()
    assert story.restart().portion() == [("a", (0, 1))]
