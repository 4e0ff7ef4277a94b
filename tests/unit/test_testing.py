"""`check_device` passes devices that keep their contract, and names the fault of one that does not."""

from itertools import islice

import pytest

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.testing import check_device
from tests.support.radix_trial import Host, RadixTrial
from tests.support.small_engine import SmallEngine, SmallRequest


def test_a_queue_device_keeps_the_contract():
    check_device(lambda: SmallEngine(7), examples=50)


class FindsAnyCopy(SmallEngine):
    def block(self, key):
        return next((block for block, each in enumerate(self.keys) if each == key), None)


def test_a_chunk_that_the_device_has_a_second_time_is_not_handed_out():
    device = FindsAnyCopy(2)
    device.handed_out()
    twins = [device.take([b"a"], 0, 1) for _ in range(2)]
    for twin in twins:
        device.computed(twin, 1)
    for twin in twins:
        device.free(twin)
    device.hand_out()
    assert not device.handed_out()
    device.hand_out()
    assert device.handed_out() == {b"a": (1,)}


def test_an_order_may_go_on_from_its_front():
    check_device(lambda: GoesOnFromTheFront(7), examples=50)


class GivesDestinationsBackInTheirOrder(SmallEngine):
    """Destinations of a load that nothing was written to hold nothing, and may wait in any order."""

    def release(self, hold):
        super().release(hold)
        empty = [block for block in hold.in_use if block in self.free_blocks and self.keys[block] is None]
        for at, block in zip(sorted(map(self.free_blocks.index, empty)), reversed(empty), strict=True):
            self.free_blocks[at] = block


def test_blocks_that_hold_nothing_may_wait_in_any_order():
    check_device(lambda: GivesDestinationsBackInTheirOrder(7), examples=100)


def test_blocks_held_while_waiting_come_back_to_their_places():
    engine = SmallEngine(3)
    engine.release(engine.hold([1]))
    assert list(engine.queue()) == [0, 1, 2]


def test_blocks_held_while_in_use_wait_last():
    engine = SmallEngine(3)
    request = engine.take(["a"], 0, 1)
    hold = engine.hold(request.blocks)
    engine.free(request)
    engine.release(hold)
    assert list(engine.queue()) == [1, 2, *request.blocks]


@pytest.mark.parametrize(("num_pages", "chunk_pages", "page_tokens"), [(7, 1, 1), (9, 2, 1), (12, 3, 2)])
def test_a_radix_device_keeps_the_contract(num_pages, chunk_pages, page_tokens):
    check_device(lambda: RadixTrial(num_pages, chunk_pages, page_tokens), examples=100)


class SharesUnfinished(SmallEngine):
    """A request uses the blocks of another that has the same chunks and has not computed them yet."""

    shares_unfinished = True

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.requests = []

    def unfinished(self, key):
        pairs = [pair for each in self.requests for pair in zip(each.keys, each.blocks, strict=True)]
        return next((block for other, block in pairs if other == key and self.find(key) is None), None)

    def take(self, keys, cached, tokens):
        table = [self.by_key[key] for key in keys[:cached]] + [self.unfinished(key) for key in keys[cached:]]
        if sum(block not in table for block in self.free_blocks) < table.count(None):
            return None
        for block in table:
            if block is not None:
                if not self.counts[block]:
                    self.free_blocks.remove(block)
                self.counts[block] += 1
        self.requests.append(SmallRequest(keys, [each for each in table if each is not None], [cached]))
        self.requests[-1].blocks[:] = [self.hand_out() if each is None else each for each in table]
        return self.requests[-1]

    def free(self, request):
        self.requests = [each for each in self.requests if each is not request]
        super().free(request)


def test_requests_may_share_blocks_that_are_not_computed_yet():
    check_device(lambda: SharesUnfinished(7), examples=200)


class SharesUnsaid(SharesUnfinished):
    shares_unfinished = False


class SharesWhateverIsThere(SharesUnfinished):
    """Whoever's tokens these are."""

    def unfinished(self, key):
        pairs = [pair for each in self.requests for pair in zip(each.keys, each.blocks, strict=True)]
        return next((block for other, block in pairs if self.find(other) is None), None)


class ReleasesToTheEnd(SmallEngine):
    """Puts last what waited when it was held."""

    def release(self, hold):
        for block, key in hold.waited:
            self._places.back((block, key))
        super().release(hold._replace(in_use=[*hold.in_use, *(block for block, _ in hold.waited)], waited=[]))


class ReleasesAncestorsFirst(SmallEngine):
    def release(self, hold):
        super().release(hold._replace(in_use=hold.in_use[::-1]))


class HoldsNothing(SmallEngine):
    """A block that waits is counted as used, and stays in the queue."""

    def hold(self, blocks, parent=()):
        return super().hold([block for block in blocks if self.counts[block]], parent)


class CountsNoBlanks(SmallEngine):
    @property
    def num_waiting(self):
        return sum(self.keys[block] is not None for block in self.free_blocks)


class FindsWhatItHandedOut(SmallEngine):
    """Until the block holds another chunk."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks, hands_out_first=False)

    def forget(self, block):
        self.keys[block] = None

    def computed(self, request, chunks):
        for block in request.blocks[request.computed[0] : chunks]:
            self.by_key = {key: at for key, at in self.by_key.items() if at != block}
        super().computed(request, chunks)


class HoldsNoDestinations(SmallEngine):
    """Only chunks with keys are held."""

    def hold(self, blocks, parent=()):
        return super().hold([block for block in blocks if self.keys[block] is not None], parent)


class TakesAnyKey(SmallEngine):
    """It does not see that a block was handed out and given back meanwhile."""

    def is_waiting(self, block, key):
        return not self.counts[block]


class HoldsOnce(SmallEngine):
    """A block is held or not: two holds of it are one, and the first that ends ends it."""

    held = frozenset()

    def hold(self, blocks, parent=()):
        new = [block for block in blocks if block not in self.held]
        self.held = self.held.union(blocks)
        return super().hold(new, parent)

    def release(self, hold):
        self.held = self.held.difference(hold.in_use, (block for block, _ in hold.waited))
        super().release(hold)


class HoldsAtLeastOne(SmallEngine):
    def hold(self, blocks, parent=()):
        assert self.users(blocks[0]) >= 0
        return super().hold(blocks, parent)


class GoesOnTooLate(SmallEngine):
    def evicted_after(self, block):
        return islice(super().evicted_after(block), 1, None)


class GoesOnBackwards(SmallEngine):
    def evicted_after(self, block):
        return reversed(list(super().evicted_after(block)))


class GoesOnFromTheFront(SmallEngine):
    def evicted_after(self, block):
        return self.soonest_evicted()


class NotesNothing(SmallEngine):
    def evicted(self, block):
        pass


class NotesTooLate(SmallEngine):
    def hand_out(self):
        block = self.free_blocks.popleft()
        self.forget(block)
        self.evicted(block)
        self.counts[block] = 1
        return block


class HandsOutNull(SmallEngine):
    null_block = 3


@pytest.mark.parametrize(
    ("device", "told"),
    [
        (ReleasesToTheEnd, "waited before"),
        (ReleasesAncestorsFirst, "behind its ancestors"),
        (HoldsNothing, "were held"),
        (CountsNoBlanks, "num_waiting"),
        (FindsWhatItHandedOut, "found and handed out"),
        (HoldsNoDestinations, "in use or held|neither waits|waits, or not"),
        (TakesAnyKey, "with any key"),
        (HoldsOnce, "held twice|neither waits|waits, or not"),
        (GoesOnTooLate, "evicted_after"),
        (GoesOnBackwards, "evicted_after"),
        (NotesNothing, "while it still has its key"),
        (NotesTooLate, "while it still has its key"),
        (HandsOutNull, "the null block"),
        (SharesUnsaid, "do not wait. If .* shares_unfinished"),
        (SharesWhateverIsThere, "do not wait|not shared|blocks were asked for"),
    ],
)
def test_a_fault_is_found_and_named(device, told):
    """Stories depend on the modules that are imported: the rarest fault takes 286 or 935 of them."""
    with pytest.raises(AssertionError, match=told):
        check_device(lambda: device(7), examples=10_000, shrink=False)


def test_a_hold_may_be_of_nothing():
    with pytest.raises(IndexError):
        check_device(lambda: HoldsAtLeastOne(7), examples=1)


class EvictsUnheard(Host):
    def evicted(self, pages):
        """The engine does not report it."""


class FreesUnderALoad(Host):
    def give_back(self, pages):
        self.free(list(pages))


class SplitsUnheard(Host):
    def placed(self, node):
        """The engine reports new leaves only."""
        if not node.children:
            super().placed(node)


class LocksNothing(Host):
    def lock(self, node, by):
        """Holds of nodes have no effect."""


class CountsNoFreePages(Host):
    @property
    def num_waiting(self):
        return self.tree.evictable


class SaysYoungestFirst(Host):
    def last_use(self, node):
        return -node.last_use


class FindsOneByOneOnly(Host):
    def find_all(self, keys):
        return [None for _ in keys]


class PromisesTooMuch(Host):
    @property
    def num_promised(self):
        return len(self.tree.free_pages) + 3


@pytest.mark.parametrize(
    ("device", "told"),
    [
        (EvictsUnheard, "free and in a node|handed out"),
        (FreesUnderALoad, "a load is writing to it"),
        (SplitsUnheard, "num_waiting|in use"),
        (LocksNothing, "were held|in use|waits, or not"),
        (CountsNoFreePages, "num_waiting"),
        (SaysYoungestFirst, "were handed out|waited before"),
        (FindsOneByOneOnly, "find_all"),
        (PromisesTooMuch, "num_promised"),
    ],
)
def test_a_fault_in_a_radix_engine_is_found_and_named(device, told):
    with pytest.raises((AssertionError, MisuseError), match=told):
        check_device(lambda: RadixTrial(9, 2, device=device), examples=10_000, shrink=False)


def test_an_engine_may_place_only_the_new_half_of_a_split():
    class TellsOfUpper(Host):
        def placed(self, node):
            if self._node[node.pages[0]] is not node:
                super().placed(node)

    check_device(lambda: RadixTrial(9, 2, device=TellsOfUpper))


def test_an_engine_without_hands_out_first_notes_nothing():
    device = SmallEngine(3, hands_out_first=False)
    with pytest.raises(MisuseError, match="hands_out_first"):
        device.evicted(0)
    assert device.handed_out() is None


def test_a_key_that_is_not_computed_yet_is_not_noted():
    device = SmallEngine(3)
    device.handed_out()
    device.keys[0] = b"a"  # by_key does not have it
    device.hand_out()
    assert not device.handed_out()


def test_notes_that_nobody_takes_do_not_grow_for_ever():
    device = SmallEngine(3)
    device.handed_out()
    for number in range(10):
        request = device.take([b"%d" % number], 0, 1)
        device.computed(request, 1)
        device.free(request)
    assert set(device.handed_out()) == {b"4", b"5", b"6"}
