"""Demands of a CPUPrefixCache on a Device, as a Hypothesis machine that an engine's author runs on his own.

    def test_my_device():
        check_device(lambda: MyTrial(num_blocks=12))

A trial is the engine's block manager, without a model: requests take blocks, give them keys, and free them. Between
that the machine holds and releases blocks as the cache does, and compares the device's reports with the events.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.offload.device import Device

try:
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis import strategies as st
    from hypothesis.stateful import (
        RuleBasedStateMachine,
        initialize,
        invariant,
        precondition,
        rule,
        run_state_machine_as_test,
    )
except ImportError as missing:
    raise ConfigurationError(
        f"cpu_prefix_cache.testing needs Hypothesis ({missing}): install its extra, testing"
    ) from missing


class Trial(Protocol):
    """An engine's blocks, of which `chunk_blocks` are a chunk. A request is any object of the engine."""

    device: Device
    chunk_blocks: int

    def take(self, keys: Sequence[bytes], cached: int, tokens: Sequence[int]) -> Any:
        """A request begins: its chunks have these keys, and each of its blocks one of these tokens.

        It uses the `cached` chunks that the device finds, from the first on, and takes blocks for the others: but with
        `shares_unfinished` it uses those of a request that has the same chunk and has not computed it yet. The request;
        or None if the engine has not so many blocks to hand out.
        """

    def blocks(self, request: Any) -> Sequence[Sequence[int]]:
        """The blocks of each of its chunks now."""

    def computed(self, request: Any, chunks: int) -> None:
        """Its first `chunks` chunks hold their tokens now, and can be found by their keys."""

    def free(self, request: Any) -> None:
        """The request ends, also while blocks of it are held: a load that it was waiting for goes on."""


def check_device(make: Callable[[], Trial], *, examples: int = 100, steps: int = 50, shrink: bool = True) -> None:
    """Run stories on devices that `make` builds, each new and with nothing in it: the same stories each time.

    Raises AssertionError when a device breaks its contract, or the MisuseError that the device itself raises, with the
    shortest story found, or with `shrink` off the first one, which is sooner.
    """

    class Machine(_Machine):
        def make(self) -> Trial:
            return make()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        ),
    )


class _Request(NamedTuple):
    keys: list[bytes]
    request: Any  # the engine's


class _TrialHold(NamedTuple):
    value: object  # what the device answered
    blocks: list[int]
    stays: Counter[int]  # of all blocks, when it began


class _Machine(RuleBasedStateMachine):
    """Knowledge beside the device: what each block holds, who uses it, and since when it waits.

    What a block holds is a digest of the tokens up to its end, and the key of a chunk is the digest of its last block.
    So chunks that part within a chunk can share the blocks before.
    """

    def make(self) -> Trial:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.trial = self.make()
        self.device, self.width = self.trial.device, self.trial.chunk_blocks
        self.requests: list[_Request] = []
        self.contents: dict[int, bytes] = {}  # of blocks that were computed since they were handed out
        self.holds: list[_TrialHold] = []
        self.prompts: list[list[bytes]] = []  # keys of requests so far
        self.chunks: dict[bytes, list[bytes]] = {}  # key -> contents of its blocks
        self.stays = Counter[int]()  # block -> how often it was used: what waited before is another stay
        self.is_before: set[tuple[tuple[int, int], tuple[int, int]]] = set()  # pairs of stays, as they waited
        assert len(self.order()) == self.device.num_blocks, "not all blocks of a new device wait"
        self.device.release(self.device.hold([]))  # of a checkpoint that others have all pieces of

    # The engine's part

    @rule(chunks=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def begins(self, chunks: list[int]) -> None:
        tokens = [token for chunk in chunks for token in _tokens(chunk, self.width)]
        keys = self.keys(tokens)
        cached = next((at for at, key in enumerate(keys) if self.device.find(key) is None), len(keys))
        found = {block for key in keys[:cached] for block in self.device.find(key) or ()}
        order = [place for place in self.order() if place[0] not in found]
        first = {block for block, key in order if key is not None and block in (self.device.find(key) or ())}
        unfinished = self.unfinished() if self.device.shares_unfinished else {}
        missing = sum(key not in unfinished for key in keys[cached:])
        wanted, room = missing * self.width, len(order) - self.device.num_promised
        here = {key: self.device.find(key) for key in self.chunks}
        self.device.handed_out()  # what left before
        request = self.trial.take(keys, cached, tokens)
        self.notes(here)
        self.stays.update(found)
        assert (request is None) == (wanted > room), f"{wanted} blocks were asked for while {room} can be handed out"
        if request is None:
            return
        self.requests.append(_Request(keys, request))
        self.prompts.append(keys)
        self.order()  # a device that sees a fault itself raises
        blocks = self.trial.blocks(request)
        for key, chunk in zip(keys, blocks[:cached], strict=False):
            assert self.has(chunk, key), f"chunk {key.hex()} was found in blocks {chunk}, which hold another"
        new: list[int] = []
        for key, chunk in zip(keys[cached:], blocks[cached:], strict=True):
            if (shared := unfinished.get(key)) is None:
                new += chunk
            else:
                assert list(chunk) == shared, f"chunk {key.hex()} is unfinished in {shared}, and not shared: {chunk}"
        self.handed_out(new, wanted, order, first)

    def notes(self, before: dict[bytes, Sequence[int] | None]) -> None:
        """A device that notes what it hands out has noted each chunk that was found `before` and is not any more."""
        noted = self.device.handed_out()
        if noted is None:
            return
        for key in noted:
            assert self.device.find(key) is None, f"handed_out() has chunk {key.hex()}, which is still found"
        left = [key for key, blocks in before.items() if blocks is not None and self.device.find(key) is None]
        for key in left:
            assert self.has(noted.get(key, ()), key), (
                f"chunk {key.hex()} left its blocks {before[key]}, and handed_out() has {noted.get(key)} for it: note "
                "each block that is handed out, while it still has its key"
            )

    def handed_out(self, new: list[int], wanted: int, order: list[tuple[int, bytes | None]], first: set[int]) -> None:
        """These were taken from the front of the order. An engine that evicts a node gives up all of its chunks.

        Those of `first` stood for a chunk that was found: the others with a key hold one that is found elsewhere, too.
        """
        assert len(set(new)) == wanted, f"{wanted} blocks were asked for, and {new} handed out"
        assert set(new) <= {block for block, _ in order}, (
            f"{new} were handed out, and some of them do not wait. If another request has them and has not computed "
            "them yet, and they are meant to be shared, the device says so: shares_unfinished"
        )
        lost = {block for block, key in order if block in first and self.device.find(key or b"") is None}
        kept = {block for block, key in order if key is not None or block not in self.contents}.difference(new, lost)
        left = [block in kept for block, _ in order if block in kept or block in lost.union(new)]
        assert left == sorted(left), f"{new} were handed out, but before some of them waited {sorted(kept)}: {order}"
        here = {each for key in self.chunks if self.device.find(key) is not None for each in self.chunks[key]}
        self.stays.update(new)
        self.stays.update(block for block, _ in order if self.contents.get(block, b"") not in here.union((b"",)))
        for block in new:
            self.contents.pop(block, None)

    @precondition(lambda self: self.requests)
    @rule(at=st.integers(0, 15), chunks=st.integers(1, 3))
    def computes(self, at: int, chunks: int) -> None:
        if self.is_loading(at):
            return
        keys, request = self.requests[at % len(self.requests)]
        begin, before = self.depth(at), self.trial.blocks(request)
        stop = min(len(keys), begin + chunks)
        self.trial.computed(request, stop)
        after = self.trial.blocks(request)
        for key, blocks in zip(keys[begin:stop], after[begin:stop], strict=True):
            self.contents.update(zip(blocks, self.chunks[key], strict=True))
            assert self.device.find(key) is not None, f"chunk {key.hex()} is not found when it is computed"
        own = {block for blocks in before for block in blocks}
        self.stays.update({block for blocks in after for block in blocks} - own)

    @precondition(lambda self: self.requests)
    @rule(at=st.integers(0, 15))
    def ends(self, at: int) -> None:
        self.trial.free(self.requests.pop(at % len(self.requests)).request)

    # The cache's part

    @precondition(lambda self: self.prompts)
    @rule(at=st.integers(0, 15), start=st.integers(0, 3))
    def stores(self, at: int, start: int) -> None:
        """Hold the chunks of a prefix from `start` on, ancestors first, whether they wait or are in use."""
        found = [self.device.find(key) for key in self.prompts[at % len(self.prompts)]]
        here = found[: (*found, None).index(None)]
        parent = here[start - 1] if 0 < start <= len(here) else ()
        self.hold([block for chunk in here[start:] for block in chunk or ()], parent or ())

    @precondition(lambda self: self.requests)
    @rule(at=st.integers(0, 15))
    def loads(self, at: int) -> None:
        """Hold what a request has not computed: destinations."""
        self.hold(self.not_computed(at), ())

    @precondition(lambda self: self.holds)
    @rule(at=st.integers(0, 15))
    def releases(self, at: int) -> None:
        hold, before = self.holds.pop(at % len(self.holds)), self.order()
        self.device.release(hold.value)
        after = self.order()
        places = set(before)
        assert [place for place in after if place in places] == before, "a release moved other blocks"
        now = {block: at for at, (block, _) in enumerate(after)}
        in_use = self.in_use()
        for block in hold.blocks:
            waits, may_wait = block in now, block not in in_use
            assert waits == may_wait or self.holds, f"block {block} waits, or not, after its hold ended"
        chunks = [block for block in hold.blocks if block in now and block in self.contents]
        ended = [now[block] for block in reversed(chunks) if not self.waited_before(block)]
        assert ended == sorted(ended), "a chunk waits behind its ancestors, which are handed out before it"
        if hold.stays != self.stays:  # a place is remembered by the block before it, which may have been used since
            self.stays.update(hold.blocks)

    @precondition(lambda self: self.holds)
    @rule(at=st.integers(0, 15))
    def holds_again(self, at: int) -> None:
        """After a reset, a chunk may be stored anew before its old store has ended. It loses its place by that."""
        hold, before = self.holds.pop(at % len(self.holds)), self.order()
        value = self.device.hold(hold.blocks, ())
        self.device.release(hold.value)
        assert self.order() == before, f"{hold.blocks} were held twice and released once, and the order changed"
        self.stays.update(hold.blocks)
        self.holds.append(_TrialHold(value, hold.blocks, self.stays.copy()))

    def hold(self, blocks: list[int], parent: Sequence[int]) -> None:
        if not blocks or any(block in hold.blocks for hold in self.holds for block in blocks):
            return  # see `holds_again`
        before = self.order()
        value = self.device.hold(blocks, parent)
        after = self.order()
        assert set(blocks).isdisjoint(block for block, _ in after), f"{blocks} were held, and some of them still wait"
        places = set(after)
        left = [place for place in before if place in places]
        assert after == left, f"{blocks} were held, and the order of others changed"
        if self.device.num_waiting >= self.device.num_promised:
            self.holds.append(_TrialHold(value, blocks, self.stays.copy()))
            return
        self.device.release(value)
        assert self.order() == before, f"{blocks} were held and released, and the order changed"

    # Invariants

    @invariant()
    def order_is_kept(self) -> None:
        """Two blocks that wait never change places, not by holds of one or both either while none is used."""
        waiting = [(block, self.stays[block]) for block, _ in self.order()]
        for at, one in enumerate(waiting):
            for other in waiting[at + 1 :]:
                assert (other, one) not in self.is_before, f"block {other[0]} waited before block {one[0]}"
                self.is_before.add((one, other))

    @invariant()
    def the_order_goes_on(self) -> None:
        """From behind a block, or from further in front: then what stands before is skipped by whoever reads."""
        order = self.order()
        for at, (block, _) in enumerate(order, start=1):
            before = set(order[:at])
            behind = [place for place in self.device.evicted_after(block) if place not in before]
            assert behind == order[at:], f"behind block {block} of {order} evicted_after has {behind}"

    @invariant()
    def counts_agree(self) -> None:
        order = self.order()
        places, in_use = dict(order), self.in_use()
        assert len(places) == len(order) == self.device.num_waiting, "num_waiting is not how many blocks wait"
        assert 0 <= self.device.num_promised <= len(order), "num_promised is not from 0 to num_waiting"
        missing = self.device.num_blocks - len(order) - len(in_use)
        assert missing == 0 or (missing > 0 and self.holds), "a block neither waits nor is in use, or both"
        assert self.device.null_block not in places, "the null block waits"
        for block, key in order:
            assert block not in in_use, f"block {block} waits, and is in use or held"
            assert self.device.is_waiting(block, key), f"block {block} waits, but is_waiting says no"
            assert not self.device.is_waiting(block, _other(key)), f"is_waiting takes block {block} with any key"
            is_of = key in (None, self.contents.get(block)) or block in (self.device.find(key or b"") or ())
            assert is_of, f"block {block} comes with the key of another chunk"
        for block in in_use:
            keys = {None, self.contents.get(block)}
            assert not any(self.device.is_waiting(block, key) for key in keys), f"block {block} is in use, and waits"

    @invariant()
    def what_is_found_is_there(self) -> None:
        found = {key: self.device.find(key) for key in self.chunks}
        for key, blocks in found.items():
            assert blocks is None or self.has(blocks, key), f"chunk {key.hex()} was found and handed out"
        together = [each and list(each) for each in self.device.find_all(list(found))]
        assert together == [each and list(each) for each in found.values()], "find_all and find do not agree"

    # Details

    def order(self) -> list[tuple[int, bytes | None]]:
        return list(self.device.soonest_evicted())

    def in_use(self) -> set[int]:
        used = {block for each in self.requests for chunk in self.trial.blocks(each.request) for block in chunk}
        return used.union(*(hold.blocks for hold in self.holds))

    def waited_before(self, block: int) -> bool:
        """Whether it has been waiting, or held, since it was used last."""
        return any((block, self.stays[block]) in pair for pair in self.is_before)

    def depth(self, at: int) -> int:
        """How many chunks of a request are computed."""
        keys, request = self.requests[at % len(self.requests)]
        done = [self.has(blocks, key) for key, blocks in zip(keys, self.trial.blocks(request), strict=True)]
        return (*done, False).index(False)

    def not_computed(self, at: int) -> list[int]:
        """The blocks of a request that hold nothing yet."""
        blocks = self.trial.blocks(self.requests[at % len(self.requests)].request)
        return [block for chunk in blocks[self.depth(at) :] for block in chunk]

    def unfinished(self) -> dict[bytes, list[int]]:
        """The blocks of the chunks that requests have and nobody finds yet."""
        chunks = (
            pair for each in self.requests for pair in zip(each.keys, self.trial.blocks(each.request), strict=True)
        )
        return {key: list(blocks) for key, blocks in chunks if self.device.find(key) is None}

    def is_loading(self, at: int) -> bool:
        """Whether a load is filling blocks of the request."""
        return not {block for hold in self.holds for block in hold.blocks}.isdisjoint(self.not_computed(at))

    def has(self, blocks: Sequence[int], key: bytes) -> bool:
        """Whether these blocks hold the chunk with this key."""
        return [self.contents.get(block) for block in blocks] == self.chunks[key]

    def keys(self, tokens: list[int]) -> list[bytes]:
        """The key of each chunk, which is remembered with its contents."""
        contents = [blake2b(bytes(tokens[: at + 1]), digest_size=16).digest() for at in range(len(tokens))]
        chunks = [contents[at : at + self.width] for at in range(0, len(contents), self.width)]
        self.chunks |= {chunk[-1]: chunk for chunk in chunks}
        return [chunk[-1] for chunk in chunks]


def _other(key: bytes | None) -> bytes | None:
    """A key that no block with this one comes with."""
    return None if key is not None else bytes(16)


def _tokens(chunk: int, width: int) -> list[int]:
    """One for each block of the chunk: its number in binary digits, so chunks 0 and 1 part at the last block."""
    return [chunk >> width - 1, *(chunk >> at & 1 for at in reversed(range(width - 1)))]
