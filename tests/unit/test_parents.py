"""Parents are remembered for as long as the device has the chunk, and what is lost is counted."""

from types import SimpleNamespace

import pytest

from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.ancestry import DeviceAncestry
from cpu_prefix_cache.offload.parents import Parents, take_run
from property_tests.strategies import chain
from tests.support.sizes import sizes_of_containers


class Keys:
    """A device that is a set of keys. It has a checkpoint if it has the chunk."""

    def __init__(self):
        self.keys = set()

    def find(self, key):
        return (0,) if key in self.keys else None

    def find_all(self, keys):
        return [self.find(key) for key in keys]

    def find_checkpoint(self, checkpoint):
        return self.find(checkpoint.tail[-1])


class Family:
    """The parents of chunks on a device, beside a host."""

    planner = SimpleNamespace(has_checkpoints=False)

    def __init__(self):
        on_device = Keys()
        self.device, self.host = on_device.keys, set()
        stores = SimpleNamespace(device=on_device, planner=self.planner, is_covered=self.host.__contains__)
        self.parents = DeviceAncestry(stores)

    def hears(self, prompt, start=0):
        self.device.update(chain(prompt))
        self.parents.add(chain(prompt), start, len(prompt))
        self.parents.sweep()


def knows(family, key):
    return key in family.parents._parent


def test_taken_chunks_are_forgotten_and_give_their_parents():
    parents = Parents(lambda keys: [True] * len(keys))
    parents.add([b"a", b"ab", b"abc"], 0, 3)
    assert parents.take([b"x", b"abc", b"a"]) == {b"abc": b"ab", b"a": None}, "unknown ones have no parent"
    assert len(parents) == 1 and parents.take([b"abc", b"ab"]) == {b"ab": b"a"}


def test_every_chunk_knows_the_one_above_it():
    family = Family()
    family.hears("abc")
    nothing = set()
    assert family.parents.missing_above(b"abc", nothing.__contains__) == ([b"a", b"ab", b"abc"], None)
    assert family.parents.missing_above(b"abc", {b"a"}.__contains__) == ([b"ab", b"abc"], b"a")
    assert family.parents.missing_above(b"x", nothing.__contains__) is None


def test_chunks_announced_twice_are_remembered_once():
    family = Family()
    family.hears("ab")
    family.hears("abc", start=1)
    assert len(family.parents) == 3


def test_chunks_that_left_the_device_are_forgotten_and_count_as_lost_if_unsaved():
    family = Family()
    family.hears("abc")
    family.host.add(b"a")
    family.parents.settled.add(b"ab")
    family.device.clear()
    family.hears("wxyz")
    assert not knows(family, b"abc") and knows(family, b"wxyz")
    assert family.parents.lost == 1 and not family.parents.settled


def test_chunks_that_the_host_had_already_are_not_lost():
    family = Family()
    family.host.update(chain("ab"))
    family.hears("abc")
    family.device.clear()
    family.hears("wxyz")
    assert not knows(family, b"abc") and family.parents.lost == 1


class Kept(Family):
    """Parents in a model where every boundary needs a checkpoint."""

    planner = SimpleNamespace(has_checkpoints=True, needs_checkpoint=lambda depth: True)

    def hears(self, prompt):
        self.device.update(chain(prompt))
        self.parents.add(chain(prompt), 0, len(prompt))
        self.parents.add_checkpoint(CheckpointAt(len(prompt), tuple(chain(prompt))))
        self.parents.sweep()


def test_a_checkpoint_that_nobody_saved_is_lost_and_its_chunks_are_not():
    kept = Kept()
    kept.host.add(checkpoint_key(b"xyz"))
    kept.hears("abc")
    kept.hears("xyz")
    kept.device.clear()
    for prompt in "mnopq":
        kept.hears(prompt)
    assert not knows(kept, checkpoint_key(b"abc")) and not knows(kept, checkpoint_key(b"xyz"))
    assert knows(kept, checkpoint_key(b"q"))
    assert kept.parents.lost == 1


@pytest.mark.parametrize("new", [Family, Kept])
def test_nothing_is_kept_of_what_was_lost(new):
    family = new()
    for number in range(300):
        family.device.clear()
        family.hears(chr(200 + number) * 10)
    assert family.parents.lost > 200
    assert sum(sizes_of_containers(family.parents).values()) < 200
    family.parents.clear()
    assert not sum(sizes_of_containers(family.parents).values())


def test_it_holds_at_most_twice_what_the_device_does():
    family = Family()
    for number in range(300):
        family.device.clear()
        family.hears(chr(200 + number) * 10)
    assert len(family.parents) <= 2 * 10


def test_chunks_that_the_device_keeps_are_never_forgotten():
    family = Family()
    family.hears("abc")
    for number in range(100):
        family.hears(chr(200 + number) * 3)
    assert knows(family, b"abc")


def test_chunks_that_were_handed_out_are_forgotten_at_once():
    family = Family()
    family.hears("abc")
    family.device.remove(b"abc")
    family.parents.handed_out([b"ab", b"abc"])
    assert knows(family, b"ab") and not knows(family, b"abc")
    assert family.parents.lost == 1


@pytest.mark.parametrize("at_once", [1, 5])
def test_nothing_else_is_looked_up_while_what_leaves_is_seen_to_leave(monkeypatch, at_once):
    """Also where several prompts leave before others come in their place."""
    family, looked_up = Family(), list[bytes]()
    find_all = Keys.find_all
    monkeypatch.setattr(Keys, "find_all", lambda self, keys: [looked_up.extend(keys), find_all(self, keys)][1])
    prompts = [chr(200 + number) * 10 for number in range(300)]
    for first in range(0, len(prompts), at_once):
        for before in prompts[max(0, first - 5) : max(0, first + at_once - 5)]:
            family.device.difference_update(chain(before))
            family.parents.handed_out(chain(before))
        for prompt in prompts[first : first + at_once]:
            family.hears(prompt)
    assert len(looked_up) <= 10 * len(prompts) + 100
    assert len(family.parents) == 50


def test_clearing_forgets_without_counting():
    family = Family()
    family.hears("abc")
    family.parents.clear()
    family.device.clear()
    family.hears("x")
    assert len(family.parents) == 1 and family.parents.lost == 0


def test_a_run_is_taken_as_a_whole_or_not():
    links = {b"ab": b"a", b"abc": b"ab"}
    left = {b"ab", b"abc", b"x"}
    assert take_run(b"abc", left, links) == ({b"abc": b"ab", b"ab": b"a"}, True)
    assert left == {b"x"}
    links = {b"ab": b"a", b"abcd": b"abc"}  # "abc" is not remembered
    assert take_run(b"abcd", {b"abcd", b"abc"}, links) == ({b"abcd": b"abc"}, False)


def test_parents_of_what_has_left_are_kept_until_transfers_have_ended():
    parents = Parents(lambda keys: [True] * len(keys))
    parents.add(chain("abcd"), 0, 4)
    left = parents.take([b"ab", b"abc"])
    assert parents.missing_above(b"abcd", {b"a"}.__contains__) is None
    parents.keep(left, next_id=7)
    parents.resolved(below=6, most=4)
    assert parents.missing_above(b"abcd", {b"a"}.__contains__) == ([b"ab", b"abc", b"abcd"], b"a") and len(parents) == 4
    parents.resolved(below=7, most=4)
    assert parents.missing_above(b"abcd", {b"a"}.__contains__) is None and len(parents) == 2


def test_parents_of_what_left_first_go_first():
    parents = Parents(lambda keys: [True] * len(keys))
    for at, key in enumerate(chain("abc")):
        parents.keep({key: None}, next_id=at)
    parents.resolved(below=0, most=1)
    assert parents.missing_above(b"abc", {b"x"}.__contains__) == ([b"abc"], None) and len(parents) == 1
