"""A keeper on windows and states, story by story. A chunk takes three slots, and a checkpoint four at most."""

import pytest

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.keeper.fair_lru import FairLru
from cpu_prefix_cache.keeper.names import named
from cpu_prefix_cache.keeper.records import HEADER_BYTES, RECORD, Records
from tests.unit.keeper.test_keeper import ONE, A, B, Node, keys_of

HYBRID = HybridChunkPlanner(
    [
        PrefixGroup(name="full", block_tokens=4, block_bytes=128),
        PrefixGroup(name="second", block_tokens=4, block_bytes=64),
        WindowGroup(name="window", block_tokens=2, block_bytes=64, window_tokens=6),
        StateGroup(name="state", block_tokens=4, block_bytes=64),
    ],
    max_model_len=64,
)


# A chunk takes two slots, and there are no checkpoints.
TWO = HybridChunkPlanner(
    [PrefixGroup(name=name, block_tokens=4, block_bytes=64) for name in ("full", "second")], max_model_len=64
)


class HybridNode(Node):
    def __init__(self, slots=24, planner=HYBRID):
        super().__init__(slots, planner=planner)

    def takes(self, engine, prompt, has_checkpoint=True):
        id = next(self.ids)
        return id, self.keeper.take(engine, id, keys_of(prompt), has_checkpoint)

    def stores(self, engine, prompt, has_checkpoint=True):
        id, granted = self.takes(engine, prompt, has_checkpoint)
        width = self.keeper.planner.host_blocks_per_chunk
        self.keeper.commit(engine, id, len(granted.slots) // width, granted.pieces is not None)
        self.keeper.check_valid()
        return granted

    def damages(self, slot):
        at = HEADER_BYTES + slot * RECORD.size
        self.file[at : at + RECORD.size] = bytes(RECORD.size)

    def begins_again(self):
        self.next_keeper()
        self.keeper.join(A, ONE)


def test_a_checkpoint_that_was_not_written_is_found_by_nobody():
    node = HybridNode()
    id, granted = node.takes(A, "ab")
    assert list(map(len, granted.pieces)) == [1, 1, 1, 1]
    node.keeper.commit(A, id, 2, False)
    assert node.finds(B, "ab") == 0 and node.keeper.statistics().writing == 0
    assert not node.stores(B, "ab").slots
    assert node.finds(A, "ab") == 2


def test_a_checkpoint_is_not_committed_beside_chunks_that_were_not_written():
    node = HybridNode()
    id, _ = node.takes(A, "ab")
    with pytest.raises(MisuseError, match="has not written"):
        node.keeper.commit(A, id, 1, True)


def test_a_lease_is_on_all_that_it_takes_to_resume():
    node = HybridNode()
    node.stores(A, "ab")
    leased = node.keeper.run(B, next(node.ids), keys_of("abcd"))
    assert (leased.present, leased.depth, len(leased.slots)) == (2, 2, 2 * 3 + 4)


def test_two_checkpoints_share_the_pieces_that_both_need():
    node = HybridNode()
    node.stores(A, "ab")
    granted = node.stores(A, "abc")
    assert (len(granted.slots), list(map(len, granted.pieces))) == (3, [0, 1, 1, 1])


def test_a_piece_that_somebody_is_writing_is_waited_for():
    node = HybridNode()
    node.stores(A, "abc", has_checkpoint=False)
    id, _ = node.takes(A, "ab")
    assert node.takes(B, "abc")[1].try_again and node.takes(B, "ab")[1].try_again
    node.keeper.commit(A, id, 0, True)
    assert list(map(len, node.takes(B, "abc")[1].pieces)) == [0, 1, 1, 1]


def test_a_checkpoint_finds_room_for_all_of_it_or_none():
    node = HybridNode(slots=9)
    _, granted = node.takes(A, "ab")
    assert (granted.all_slots, granted.pieces) == ([], None)
    id, granted = node.takes(A, "a")
    assert len(granted.all_slots) == 6
    node.keeper.commit(A, id, 1, False)
    assert node.stores(B, "x").pieces is not None, "chunks without a checkpoint make room"


def test_the_next_keeper_finds_checkpoints_whose_pieces_are_all_there():
    node = HybridNode()
    node.stores(A, "ab")
    node.stores(A, "abc")
    node.begins_again()
    assert node.found == 3 * 3 + 4 + 3
    assert [node.finds(A, prompt) for prompt in ("abx", "abcx")] == [2, 3]


@pytest.mark.parametrize("piece", range(4))
def test_a_window_or_a_state_of_which_a_slot_was_written_over_is_not_found(piece):
    node = HybridNode()
    pieces = node.stores(A, "ab").pieces
    node.damages(pieces[piece][0])
    node.begins_again()
    assert (node.found, node.finds(A, "ab")) == (2 * 3, 0)


@pytest.mark.parametrize("place", range(3))
def test_a_chunk_of_which_a_slot_was_written_over_is_not_found(place):
    node = HybridNode()
    node.stores(A, "a")
    node.damages(node.stores(A, "abc").slots[place])
    node.begins_again()
    assert (node.found, node.finds(A, "abc")) == (3 + 3, 1)


def test_pieces_that_were_being_written_when_the_keeper_ended_hold_nothing():
    node = HybridNode(slots=13)
    pieces = {slot for piece in node.stores(A, "ab").pieces for slot in piece}
    node.stores(B, "x", has_checkpoint=False)
    _, granted = node.takes(B, "x")
    assert not granted.slots and pieces >= set(granted.all_slots)
    node.begins_again()
    assert node.finds(A, "ab") == 0


@pytest.mark.parametrize("place", range(2))
def test_a_chunk_of_two_slots_of_which_one_was_written_over_is_not_found(place):
    node = HybridNode(planner=TWO)
    node.stores(A, "a", has_checkpoint=False)
    node.damages(node.stores(A, "abc", has_checkpoint=False).slots[place])
    node.stores(A, "x", has_checkpoint=False)
    node.begins_again()
    assert (node.found, node.finds(A, "abc"), node.finds(A, "x")) == (2 + 2, 1, 1)


def test_a_chunk_that_lies_in_two_places_is_taken_in_once():
    node = HybridNode(slots=12)
    records = Records(node.file)
    a, b, _ = named(ONE, keys_of("abc"))
    for slots in ([0, 1, 2], [3, 4, 5]):
        records.write(slots, a, None)
    records.write([6, 7, 8], b, a)
    node.begins_again()
    assert node.found == 6 and node.keeper.statistics().free == 6
    assert node.keeper.run(A, next(node.ids), keys_of("ab")).present == 2


def test_a_chunk_of_which_a_slot_is_damaged_takes_no_other_with_it():
    node = HybridNode(slots=12)
    records = Records(node.file)
    for slots, prompt in (([0, 1, 2], "a"), ([3, 4, 5], "x")):
        records.write(slots, *named(ONE, keys_of(prompt)), None)
    node.damages(0)  # two slots are left, and none of them is the first
    node.begins_again()
    assert node.found == 3 and node.keeper.run(A, next(node.ids), keys_of("x")).present == 1


def left_of_a_quiet_engine():
    """Chunks that can be resumed from, after another engine has stored four times as much as the pool holds."""
    node = HybridNode(slots=120)
    node.stores(A, "abcdefgh")
    for number in range(30):
        node.stores(B, chr(200 + number) + "zzz")
    return node.finds(A, "abcdefgh")


def test_a_noisy_engine_does_not_empty_what_a_quiet_one_has(monkeypatch):
    """An engine's half is counted in chunks and checkpoints, of which the pool holds fewer than slots."""
    assert left_of_a_quiet_engine() == 8
    monkeypatch.setattr(FairLru, "_excess", lambda self, touch: 0)
    assert left_of_a_quiet_engine() == 0  # plain LRU
