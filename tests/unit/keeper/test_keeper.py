"""A keeper's decisions, story by story: leases, writes, fairness, and the keeper that comes next.

A prompt is letters, one to a chunk.
"""

from unittest.mock import Mock

import pytest

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup, StateGroup
from cpu_prefix_cache.keeper import keeper as keepers
from cpu_prefix_cache.keeper.answers import Granted
from cpu_prefix_cache.keeper.fair_lru import MOST_ENGINES
from cpu_prefix_cache.keeper.keeper import Keeper
from cpu_prefix_cache.keeper.names import named
from cpu_prefix_cache.keeper.protocol import NAMESPACE_BYTES
from cpu_prefix_cache.keeper.records import HEADER_BYTES, MAGIC, RECORD, Records, records_bytes
from cpu_prefix_cache.messages.tier import KEY_BYTES

FULL = HybridChunkPlanner([PrefixGroup(name="full", block_tokens=4, block_bytes=64)], max_model_len=64)
STATE = StateGroup(name="state", block_tokens=4, block_bytes=64)
STATES = HybridChunkPlanner([*FULL.groups, STATE], max_model_len=64)  # a chunk has a slot, and so has a checkpoint
ONE, OTHER = bytes(NAMESPACE_BYTES), b"1" * NAMESPACE_BYTES
A, B = 1, 2


def keys_of(prompt):
    return [prompt[: at + 1].encode().ljust(KEY_BYTES, b".") for at in range(len(prompt))]


class Node:
    """A keeper with engines A and B, and the file of its records."""

    def __init__(self, slots=8, engines=(A, B), planner=FULL):
        self.slots = slots
        self.file = memoryview(bytearray(records_bytes(slots)))
        records = Records(self.file)
        records.begin(slots, 64)
        self.keeper = Keeper(slots, records, planner)
        self.ids = iter(range(1_000_000))
        for engine in engines:
            self.keeper.join(engine, ONE)

    def takes(self, engine, prompt):
        id = next(self.ids)
        return id, self.keeper.take(engine, id, keys_of(prompt), self.keeper.planner.has_checkpoints)

    def stores(self, engine, prompt):
        """Look the prompt up, and store what is missing. How many chunks were found."""
        found = self.finds(engine, prompt)
        id, granted = self.takes(engine, prompt)
        self.keeper.commit(engine, id, len(granted.slots), granted.pieces is not None)
        self.keeper.check_valid()
        return found

    def finds(self, engine, prompt):
        id = next(self.ids)
        leased = self.keeper.run(engine, id, keys_of(prompt))
        self.keeper.release(engine, id)
        return leased.depth

    def next_keeper(self, *absent):
        self.keeper = Keeper(self.slots, Records(self.file), self.keeper.planner)
        self.keeper.absent.update(absent)
        self.found = self.keeper.recover()
        self.keeper.check_valid()


def test_the_names_of_one_namespace_have_many_first_bytes():
    """A dictionary with a million names would stop the keeper for some tenths of a second whenever it is rebuilt."""
    node = Node(slots=64)
    for at in range(64):
        node.stores(A, chr(100 + at))
    assert len({name[0] for name in node.keeper._pool._forest.nodes().values()}) > 16


def test_one_engine_finds_what_another_one_stored():
    node = Node()
    node.stores(A, "abc")
    assert [node.finds(B, prompt) for prompt in ("abc", "abx", "x")] == [3, 2, 0]


def test_as_many_engines_as_a_pool_takes_store_and_find():
    engines = range(1, MOST_ENGINES + 1)
    node = Node(slots=MOST_ENGINES, engines=engines)
    for engine in engines:
        node.stores(engine, chr(100 + engine))
    assert all(node.finds(MOST_ENGINES + 1 - engine, chr(100 + engine)) for engine in engines)


def test_engines_with_other_weights_do_not_meet_and_meet_again_at_the_same_revision():
    node = Node()
    node.stores(A, "abc")
    node.keeper.name(A, OTHER)
    assert node.finds(A, "abc") == 0
    node.stores(A, "ab")
    assert node.finds(B, "abc") == 3
    node.keeper.name(B, OTHER)
    assert node.finds(B, "abc") == 2


def test_one_of_two_engines_with_one_key_writes_and_the_other_tries_again():
    node = Node()
    id, granted = node.takes(A, "abc")
    assert (granted.first, len(granted.slots)) == (0, 3)
    assert node.takes(B, "abc")[1] == Granted(0, (), try_again=True)
    node.keeper.commit(A, id, 3, False)
    assert node.takes(B, "abcd")[1].first == 3
    assert node.takes(B, "abc")[1] == Granted(3, ())


def test_slots_that_an_engine_was_writing_are_free_when_it_is_gone():
    node = Node(slots=3)
    node.takes(A, "abc")
    assert not node.takes(B, "xyz")[1].slots
    node.keeper.leave(A)
    assert len(node.takes(B, "xyz")[1].slots) == 3


def test_nobody_overwrites_what_is_leased_and_the_lease_ends_with_the_engine():
    node = Node(slots=3)
    node.stores(A, "abc")
    node.keeper.run(A, next(node.ids), keys_of("ab"))
    assert len(node.takes(B, "xyz")[1].slots) == 1
    node.keeper.leave(A)
    assert len(node.takes(B, "uvw")[1].slots) == 2


def test_a_take_that_was_written_in_part_is_found_in_part():
    node = Node()
    id, _ = node.takes(A, "abc")
    node.keeper.commit(A, id, 1, False)
    assert node.finds(B, "abc") == 1
    with pytest.raises(MisuseError, match="has not taken"):
        node.keeper.commit(A, id, 1, False)


def test_a_request_uses_the_checkpoint_that_it_resumed_from_together_with_what_it_adds():
    node = Node(slots=6, planner=STATES)
    assert [node.stores(A, prompt) for prompt in ("ab", "abcd", "x")] == [0, 2, 0]
    assert [node.finds(B, prompt) for prompt in ("x", "abc")] == [1, 2], "the end of a prompt leaves first"


def test_nothing_is_evicted_for_chunks_whose_checkpoint_has_no_room():
    node = Node(slots=8, planner=STATES)
    assert [node.stores(A, prompt) for prompt in ("ab", "cd")] == [0, 0]
    node.keeper.run(A, next(node.ids), keys_of("cd"))  # leased: five slots could be had
    assert node.takes(B, "vwxyz")[1] == Granted(0, ())
    assert node.finds(B, "ab") == 2
    assert len(node.takes(B, "wxyz")[1].all_slots) == 5


def left_of_a_quiet_engine(chunks=8):
    """Chunks that are left of one, after another one has stored twenty times as much as it had."""
    node = Node(slots=40)
    prompt = "".join(map(chr, range(100, 100 + chunks)))
    node.stores(A, prompt)
    for number in range(40):
        node.stores(B, chr(200 + number) + "zzz")
    return node.finds(A, prompt)


def test_a_noisy_engine_does_not_empty_what_a_quiet_one_has(monkeypatch):
    assert left_of_a_quiet_engine() == 8
    monkeypatch.setattr(keepers.FairLru, "_excess", lambda self, touch: 0)
    assert left_of_a_quiet_engine() == 0  # plain LRU


def test_an_engine_pays_from_half_of_the_pool_on():
    assert left_of_a_quiet_engine(chunks=30) == 16  # half, less a prompt that came when both had half


def test_an_engine_that_is_alone_has_the_whole_pool():
    node = Node(slots=8, engines=[A])
    node.stores(A, "abcdefgh")
    assert node.finds(A, "abcdefgh") == 8


def test_chunks_of_an_engine_that_is_gone_leave_by_their_age():
    node = Node(slots=8)
    node.stores(A, "abcd")
    node.keeper.leave(A)
    assert node.finds(B, "abcd") == 4
    node.stores(B, "efghijkl")
    assert node.finds(B, "abcd") == 0


def test_the_next_keeper_finds_what_was_committed_and_nothing_that_was_being_written():
    node = Node()
    node.stores(A, "abc")
    node.takes(A, "abcd")
    node.next_keeper()
    node.keeper.join(B, ONE)
    assert node.found == 3 and node.finds(B, "abcd") == 3


def test_the_next_keeper_finds_a_parent_in_a_later_slot_than_its_child():
    node = Node(slots=4)
    early, _ = node.takes(A, "xy")  # slots 0 and 1
    node.stores(B, "ab")
    node.keeper.commit(A, early, 0, False)
    node.stores(B, "abcd")  # c and d are in slots 0 and 1
    node.next_keeper()
    node.keeper.join(B, ONE)
    assert node.finds(B, "abcd") == 4


def test_the_next_keeper_hands_out_nothing_while_an_engine_may_still_write():
    node = Node()
    node.stores(A, "abc")
    node.next_keeper(A, B)
    node.keeper.join(A, ONE)
    assert node.finds(A, "abc") == 3
    assert node.takes(A, "abcd")[1] == Granted(3, (), try_again=True)
    node.keeper.absent.discard(B)  # its lock is free
    assert len(node.takes(A, "abcd")[1].slots) == 1


def test_a_record_that_is_not_whole_is_a_free_slot():
    node = Node()
    node.stores(A, "abc")
    after_c = HEADER_BYTES + 3 * RECORD.size
    node.file[after_c - KEY_BYTES : after_c] = bytes(KEY_BYTES)  # its keeper ended before it wrote the parent
    node.next_keeper()
    node.keeper.join(B, ONE)
    assert node.found == 2 and node.finds(B, "abc") == 2


def test_a_chunk_whose_parent_has_no_record_is_a_free_slot():
    node = Node(slots=3)
    node.stores(A, "abc")
    after_b = HEADER_BYTES + 2 * RECORD.size
    node.file[after_b - KEY_BYTES : after_b] = bytes(KEY_BYTES)
    node.next_keeper()
    node.keeper.join(B, ONE)
    assert node.found == 1 and node.finds(B, "abc") == 1
    assert len(node.takes(B, "xyz")[1].slots) == 3


def test_the_places_of_records_are_those_of_their_format():
    """A file outlives its keeper, and may be read by the next release."""
    assert (MAGIC, HEADER_BYTES, RECORD.size) == (b"cpc keeper rec 3", 4096, 84)


def test_the_chunk_above_a_write_stays():
    node = Node(slots=3)
    node.stores(A, "a")
    id, _ = node.takes(A, "ab")
    assert len(node.takes(B, "xyz")[1].slots) == 1
    node.keeper.commit(A, id, 1, False)
    assert node.finds(A, "ab") == 2


def test_a_slot_that_was_written_to_when_the_keeper_ended_holds_nothing():
    node = Node(slots=3)
    node.stores(A, "abc")
    assert len(node.takes(B, "xyz")[1].slots) == 3
    node.next_keeper()
    assert node.found == 0


def key(letter):
    return letter.encode() * KEY_BYTES


@pytest.mark.parametrize("ask", ["run", "take"])
@pytest.mark.parametrize("prompt", ["yk", "xx", "xyk", "xkk", "k"])
def test_keys_of_several_prompts_get_no_slot_and_break_nothing(ask, prompt):
    node = Node()
    for stored in ("xk", "y"):
        id = next(node.ids)
        node.keeper.take(A, id, list(map(key, stored)))
        node.keeper.commit(A, id, len(stored), False)
    with pytest.raises(MisuseError, match="prompt"):
        getattr(node.keeper, ask)(A, next(node.ids), list(map(key, prompt)))
    node.keeper.check_valid()
    assert node.keeper.run(A, next(node.ids), list(map(key, "xk"))).depth == 2


def test_a_key_is_not_written_below_another_prompt_than_its_own():
    node = Node()
    id = next(node.ids)
    node.keeper.take(A, id, [key("x"), key("k")])
    node.keeper.commit(A, id, 2, False)
    with pytest.raises(MisuseError, match="another prompt"):
        node.keeper.take(B, next(node.ids), [key("u"), key("v"), key("k"), key("w"), key("z")])


def test_a_commit_that_fails_loses_no_slot(monkeypatch):
    node = Node(slots=3)
    id, _ = node.takes(A, "abc")
    monkeypatch.setattr(node.keeper._pool, "commit", Mock(side_effect=[MisuseError("a rule"), None]))
    with pytest.raises(MisuseError, match="a rule"):
        node.keeper.commit(A, id, 3, False)
    node.keeper.leave(A)
    node.keeper.check_valid()
    assert len(node.takes(B, "xyz")[1].slots) == 3


def test_a_question_that_no_engine_asks_ends_in_a_sentence():
    node = Node()
    with pytest.raises(MisuseError, match="comes twice"):
        node.keeper.take(A, next(node.ids), keys_of("a") * 2)
    with pytest.raises(MisuseError, match="joined already"):
        node.keeper.join(A, ONE)
    node.stores(A, "a")
    node.keeper.run(A, 77, keys_of("a"))
    node.keeper.take(A, 78, keys_of("b"))
    for number in (77, 78):
        with pytest.raises(MisuseError, match="another question"):
            node.keeper.run(A, number, keys_of("a"))


def test_chunks_of_all_engines_leave_in_the_order_that_is_foretold():
    node = Node(slots=6)
    for engine, prompt in ((A, "ab"), (B, "xy"), (A, "cd")):
        node.stores(engine, prompt)
    node.finds(B, "ab")
    pool = node.keeper._pool
    names = {pool.find(name): letter for prompt in ("ab", "xy", "cd") for letter, name in named_by_letter(prompt)}
    assert "".join(names[chunk] for chunk in pool.soonest_evicted()) == "yxdcba"
    left = [names[chunk] for chunk in pool.soonest_evicted()][:3]
    node.takes(A, "uvw")
    assert [node.finds(A, prompt) for prompt in ("xy", "cd", "ab")] == [0, 1, 2] and left == ["y", "x", "d"]


def named_by_letter(prompt):
    return zip(prompt, named(ONE, keys_of(prompt)), strict=True)
