"""Parents are remembered for as long as the device has the chunk, and what is lost is counted."""

import pytest

from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.parents import Parents
from tests.sizes import sizes_of_containers
from tests.story import chain


class Family:
    """A lineage beside a device and a host that are sets of keys."""

    def __init__(self):
        self.device, self.host = set(), set()
        self.parents = Parents(lambda keys: [key in self.device for key in keys], self.host.__contains__)

    def hears(self, prompt, start=0):
        self.device.update(chain(prompt))
        saved = next((at for at, key in enumerate(chain(prompt)) if key not in self.host), len(prompt))
        self.parents.add(chain(prompt), start, len(prompt), saved)
        self.parents.sweep()


def test_every_chunk_knows_the_one_above_it():
    family = Family()
    family.hears("abc")
    assert family.parents.parent(b"a") is None
    assert family.parents.parent(b"abc") == b"ab"
    with pytest.raises(KeyError):
        family.parents.parent(b"x")


def test_chunks_heard_of_twice_are_remembered_once():
    family = Family()
    family.hears("ab")
    family.hears("abc", start=1)
    assert len(family.parents) == 3


def test_what_left_the_device_is_forgotten_and_counted_when_nobody_saved_it():
    family = Family()
    family.hears("abc")
    family.parents.saved([b"a"])
    family.host.add(b"a")
    family.device.clear()
    family.hears("wxyz")
    assert b"abc" not in family.parents and b"wxyz" in family.parents
    assert family.parents.lost == 2  # "a" was saved


class Kept:
    """A lineage where every boundary needs a checkpoint, beside a device that has both or neither of a chunk."""

    def __init__(self):
        self.device, self.host = set(), set()
        self.parents = Parents(
            lambda keys: [key in self.device for key in keys],
            self.host.__contains__,
            has_checkpoint=lambda checkpoint: checkpoint.tail[-1] in self.device,
            needs_checkpoint=lambda depth: True,
        )

    def hears(self, prompt):
        self.device.update(chain(prompt))
        self.parents.add(chain(prompt), 0, len(prompt), saved=0)
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
    assert checkpoint_key(b"abc") not in kept.parents and checkpoint_key(b"xyz") not in kept.parents
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


def test_what_the_device_keeps_is_never_forgotten():
    family = Family()
    family.hears("abc")
    for number in range(100):
        family.hears(chr(200 + number) * 3)
    assert family.parents.parent(b"abc") == b"ab"


def test_clearing_forgets_without_counting():
    family = Family()
    family.hears("abc")
    family.parents.clear()
    family.device.clear()
    family.hears("x")
    assert len(family.parents) == 1 and family.parents.lost == 0
