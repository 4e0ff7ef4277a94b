"""KeyedHostCache: both halves of the host cache for an engine that has its own index, and asks for blocks by keys.

    put(keys, blocks)     ->  PutHandle     the host copies what it lacks; until that is done nobody writes to blocks
    lookup(keys)          ->  FoundKeys     a lease: what was found stays, until
    release(found)
    load(keys, blocks)    ->  LoadHandle    an event for each layer; load_together for what one forward waits for

A key is that of a full chunk and of all before it; `keys` are those of chunks that follow each other in one prompt.
`blocks` has a list for each group, of the last of the keys:

    put([k0, k1, k2, k3], [[7, 9, 4, 1], [1]])      attention of all four keys, a state of the last
    put([k0, k1, k2, k3], [[4, 1], []])             of the last two keys; the others tell what comes before them

Each rank has a cache of its own, and they need not have the same keys: what all of them found is for the engine to
intersect, and whether all loads have ended well to reduce, as it does for its own.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cpu_prefix_cache.host_cache.arguments import check_keys
from cpu_prefix_cache.host_cache.copying_half import CopyingHalf
from cpu_prefix_cache.host_cache.handles import CopyHandle, LoadHandle, PutHandle
from cpu_prefix_cache.host_cache.host_tier import TierBelow, options_below
from cpu_prefix_cache.host_cache.options import (
    USUAL_HOST,
    HostOptions,
    check_host_bytes,
    check_keyed_options,
    check_options,
    check_tokens_of,
)
from cpu_prefix_cache.keyed.found_keys import FoundKeys
from cpu_prefix_cache.keyed.given import Given, given
from cpu_prefix_cache.keyed.key_planner import ANY_LENGTH, KeyPlanner
from cpu_prefix_cache.keyed.keyed_cache import KeyedCache
from cpu_prefix_cache.keyed.keyed_load import KeyedLoad
from cpu_prefix_cache.keyed.tiered_keyed_cache import TieredKeyedCache
from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError
from cpu_prefix_cache.messages.numbers import Numbers, is_integer, is_whole, numbers
from cpu_prefix_cache.messages.stats import CacheStatistics, TierStatistics
from cpu_prefix_cache.messages.texts import check_text
from cpu_prefix_cache.offload.transfers import Transfer
from cpu_prefix_cache.slab.tier import Tier

if TYPE_CHECKING:
    from cpu_prefix_cache.copier.base import Copier
    from cpu_prefix_cache.kv_layout import KVGroup

NAP_SECONDS = 0.001  # between looks at a tier


@dataclass(frozen=True, slots=True)
class KeyedStatistics:
    """A KeyedHostCache at one moment. `leases` are open; `leases_left` were when a reset or `close` ended them."""

    cache: CacheStatistics
    host_bytes: int
    ready_bytes: int  # grows to host_bytes while the region is pinned
    leases: int
    leases_left: int
    tier: TierStatistics | None = None


class KeyedHostCache(CopyingHalf):
    """Blocks of `groups` in `host_bytes` of host memory, by keys of `chunk_tokens` tokens.

    Of the `options` there are `policy`, `threads`, `load_seconds` and `wrap_copier`.

    `below` is a FileTier for what host memory cannot hold (docs/tiers.md); then keys are sha256 digests, a load may
    wait for it, and `poll` is called now and then.

    All calls are made in one thread, and raise MisuseError after `close`. The first begins to pin the region for a
    device, or `prepare` waits for it; until a part of it is pinned, the host keeps nothing of what is put.

    Raises ConfigurationError when the parts do not fit together or the machine does not have the memory.
    """

    cache: KeyedCache

    def __init__(
        self,
        groups: "Sequence[KVGroup]",
        *,
        host_bytes: int,
        chunk_tokens: int | None = None,
        null_block: int | None = None,
        options: HostOptions = USUAL_HOST,
        below: Tier | None = None,
    ) -> None:
        from cpu_prefix_cache.kv_layout import check_groups

        check_host_bytes(host_bytes)
        if chunk_tokens is not None:
            check_tokens_of(chunk_tokens=chunk_tokens)
        check_options(options)
        check_keyed_options(options)
        check_groups(groups)
        planner = KeyPlanner([each.group for each in groups], chunk_tokens=chunk_tokens, in_pages=below is not None)
        num_blocks = host_bytes // planner.host_block_bytes
        if num_blocks < planner.fewest_blocks:
            raise ConfigurationError(
                f"host_bytes must hold at least what one key has, {planner.fewest_blocks * planner.host_block_bytes} "
                f"bytes, got {host_bytes}"
            )
        self._begin_copying(planner, groups, num_blocks, options, null_block=null_block)
        ready, policy = self._arena.ready_blocks, options.policy
        self._tier: TierBelow | None = None
        if below is None:
            self.cache = KeyedCache(planner, host_blocks=num_blocks, ready_blocks=ready, policy=policy)
        else:
            self.cache = tiered = TieredKeyedCache(
                planner,
                host_blocks=num_blocks,
                below=options_below(below, planner, num_blocks),
                ready_blocks=ready,
                policy=policy,
            )
            self._tier = TierBelow(below, tiered, groups, self._arena.blocks)
        self._sizes = [each.num_blocks for each in groups]
        self._null_block = null_block
        self._key_bytes = set[int]()  # the length of all keys, once there is one
        self._sections = [*_sections(groups, self._copier)]
        self._handles: dict[int, CopyHandle] = {}  # by transfer
        self._waiting: dict[KeyedLoad, LoadHandle] = {}  # for the tier

    def put(self, keys: Sequence[bytes], blocks: Sequence[Numbers]) -> PutHandle:
        """Copy what the host lacks of these keys out of `blocks`, after all that compute has been given so far.

        What is here, or is being copied, is not copied again. Nobody writes to `blocks` until the handle is done. It is
        `ok` if no copy has failed, also where the host had no room, and `is_kept` if host or tier have all of it.

        Raises MisuseError for keys that are no digests, or come twice, and for blocks that do not exist, or are not
        those of the last keys.
        """
        self._check_keys(keys)
        self.poll()
        places, keys = self._given(keys, blocks), [*keys]
        handle = PutHandle(self.poll, keeps=partial(self.cache.keeps, keys, places))
        self._taken(keys)
        self._carry_out({handle: self.cache.put(keys, places, time.monotonic())})
        return handle

    def lookup(self, keys: Sequence[bytes], *, before: int = 0) -> FoundKeys:
        """Look up these keys, from the first on; `before` more come before them in the prompt, which chunk-local
        attention alone needs to know. The answer is a lease: what it names stays until `release`, a reset or `close`.

        Raises MisuseError for keys as `put`, and for a `before` that is no number of keys.
        """
        self._check_keys(keys)
        if not is_whole(before):
            raise MisuseError(f"before is a whole number of keys, got {before!r}")
        self.poll()
        self._taken(keys)
        return self.cache.lookup(keys, before)

    def release(self, found: FoundKeys) -> None:
        """End the lease of a lookup. Raises MisuseError the second time, and for one of another cache."""
        self._check_usable()
        self.cache.release(found)

    def load(self, keys: Sequence[bytes], blocks: Sequence[Numbers]) -> LoadHandle:
        """Fill `blocks`, after all that compute has been given so far. Nobody else uses them until the handle is done,
        or a layer of them until that has come.

        If some of it is not here any more, nothing is copied, and the handle is done and not `ok`. Where a copy fails,
        `blocks` hold anything, and its keys are forgotten.

        Raises MisuseError as `put`, and for a block that is given twice.
        """
        return self.load_together([(keys, blocks)])[0]

    def load_together(self, loads: Sequence[tuple[Sequence[bytes], Sequence[Numbers]]]) -> list[LoadHandle]:
        """As `load`, the keys and the blocks of several loads that one forward waits for: their first layers come
        first. `load_seconds` is for all of them. MisuseError also for a block that two of them fill; then none begins.
        """
        self._check_keys(*(keys for keys, _ in loads))
        self.poll()
        given = [(keys, self._given(keys, blocks)) for keys, blocks in loads]
        for at in range(len(self._sizes)):
            self._check_filled_once(at, [block for _, places in given for block in places.by_group[at]])
        self._taken(*(keys for keys, _ in loads))
        planned = [self.cache.load(keys, places, time.monotonic()) for keys, places in given]
        handles = [LoadHandle(self.poll, sections=self._sections, hold=self._copier.hold_compute) for _ in planned]
        self._waiting |= {load: handle for load, handle in zip(planned, handles, strict=True) if load.waits}
        self._begin({handle: load for load, handle in zip(planned, handles, strict=True) if not load.waits})
        self._step_tier()
        return handles

    @property
    def is_off(self) -> bool:
        """Whether nothing is kept nor found any more, since copies have failed again and again."""
        return self.cache.is_off

    def poll(self) -> None:
        """See what has ended, and go on with what waits for the tier. So do `put`, `lookup`, `load`, `drain`, and
        `is_done` and `wait` of handles.
        """
        self._check_usable()
        self._arena.register()
        if self._tier is not None:
            self._tier.report()
        for ended in self.cache.report(self._worker.report()):
            handle = self._handles.pop(ended.transfer.id, None)
            if handle is not None:
                handle.ended(ended.transfer.id, ended.ok)
        self._step_tier()
        # last: what is planned is carried out before any other call plans
        self._begin({self._waiting.pop(load): load for load in self.cache.take_ready()})

    def drain(self) -> None:
        """Wait for all that was put and is loaded."""
        self.poll()
        while self._waiting:
            time.sleep(NAP_SECONDS)
            self.poll()
        self._worker.drain()
        self.poll()

    def reset(self, revision: str | None = None) -> None:
        """Nothing put before now may be loaded again: new weights, for example. Leases end, and what is under way
        fails; it may write until it is done.

        A `revision` names the weights from now on, for the tier. Raises ConfigurationError for one that is no text.
        """
        if revision is not None:
            check_text("the revision of a reset", revision)
        self._check_usable()
        if self._tier is None:
            self.cache.reset()
        else:
            self._tier.reset(revision)
        for handle in self._handles.values():
            handle.failed()

    def statistics(self) -> KeyedStatistics:
        return KeyedStatistics(
            self.cache.statistics(),
            host_bytes=self._host_bytes,
            ready_bytes=self._ready_bytes,
            leases=self.cache.num_leases,
            leases_left=self.cache.leases_left,
            tier=None if self._tier is None else self._tier.statistics(),
        )

    def _close(self) -> None:
        self.drain()
        self.cache.end_leases()
        if self._tier is not None:
            self._tier.flush(self.poll)
            self._tier.close()
        super()._close()

    def _begin(self, loads: Mapping[CopyHandle, KeyedLoad]) -> None:
        gone = [handle for handle, load in loads.items() if load.is_gone]
        self._carry_out({handle: load.transfers for handle, load in loads.items()}, gone)

    def _carry_out(self, planned: Mapping[CopyHandle, Sequence[Transfer]], gone: Collection[CopyHandle] = ()) -> None:
        """Begin the transfers of these handles together."""
        if any(planned.values()):
            self._worker.run(self.cache.step())
        for handle, transfers in planned.items():
            ends = {each.id: self._worker.end_of(each.id) for each in transfers}
            self._handles.update(dict.fromkeys(handle.begun(ends, ok=handle not in gone), handle))

    def _step_tier(self) -> None:
        if self._tier is not None:
            self._tier.run()

    def _given(self, keys: Sequence[bytes], blocks: Sequence[Numbers]) -> Given:
        try:
            by_group = [[*numbers(each)] for each in blocks]  # a load may wait, and the engine use its lists again
        except TypeError as error:
            raise MisuseError(f"blocks are one list for each of {len(self._sizes)} groups, got {blocks!r}") from error
        places = given(self.cache.planner, len(keys), by_group)
        for at, (each, size) in enumerate(zip(by_group, self._sizes, strict=True)):
            for block in each:
                if not (is_integer(block) and 0 <= block < size) or block == self._null_block:
                    raise MisuseError(f"group {self._name(at)!r} has no block {block!r}: those up to {size - 1} exist")
        return places

    def _check_filled_once(self, at: int, blocks: Sequence[int]) -> None:
        if len(set(blocks)) != len(blocks):
            raise MisuseError(f"a block of group {self._name(at)!r} is given twice: nothing can be loaded into it")

    def _taken(self, *prompts: Sequence[bytes]) -> None:
        """A call with the keys of these prompts is not refused."""
        self._key_bytes.update(len(key) for keys in prompts for key in keys[:1])

    def _check_keys(self, *prompts: Sequence[bytes]) -> None:
        for keys in prompts:
            check_keys(keys, num_tokens=ANY_LENGTH, chunk_tokens=1, persist=self._tier is not None, every=False)
        are_bytes = all(set(map(type, keys)) <= {bytes} for keys in prompts)
        if not are_bytes or len(self._key_bytes.union(*(map(len, keys) for keys in prompts))) > 1:
            raise MisuseError("keys are digests of one length, that of all keys of this cache (rule 14)")
        if any(len(set(keys)) < len(keys) for keys in prompts):
            raise MisuseError("a key comes twice: a key is that of all tokens up to the end of its chunk (rule 14)")

    def _name(self, at: int) -> str:
        return self.cache.planner.groups[at].name


def _sections(groups: "Sequence[KVGroup]", copier: "Copier") -> Iterator[int | None]:
    """For each layer the section of a load with which all of it has come, and of those before it."""
    layers = range(1 + max(layer for each in groups for layer in each.layers))
    sections = [copier.sections(at) for at in range(len(groups))]
    if not any(sections):
        yield from (None for _ in layers)
        return
    parts = [
        each for group, of in zip(groups, sections, strict=True) for each in zip(group.part_layers, of, strict=True)
    ]
    for layer in layers:
        yield max((section for at, section in parts if at <= layer), default=0)
