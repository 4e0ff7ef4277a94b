"""RadixHostCache: the host cache of an engine with a radix tree, which answers about the tree's pages itself.

The engine says once what it has computed: what the tree has. So no call has numbers of tokens but `start`:

    placed, evicted, give_back      as of every RadixDevice
    inserted(id, pages)             after `placed`: the tree has these pages of a request
    start, begin_step, drain        as of a HostCache
    end_step(), end(id)             with what `inserted` has reported
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from cpu_prefix_cache.host_cache.halves import Halves
from cpu_prefix_cache.kv_layout import check_groups
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.numbers import Numbers, check_whole, numbers
from cpu_prefix_cache.offload.radix_device import RadixDevice

if TYPE_CHECKING:
    from cpu_prefix_cache.kv_layout import KVGroup


class RadixHostCache(RadixDevice, Halves):
    """A host prefix cache behind a radix tree over pages: the one object of its engine. A subclass has the members of a
    RadixDevice.

    `num_pages` is how many pages the engine hands out, a page the block of `groups`, and `chunk_tokens` the tokens of a
    chunk, a multiple of those of a page. `hands_out_first` is that of RadixDevice, `options` are those of HostCache.

    It refers to itself: one that is dropped without `close` gives its memory back at a collection of garbage.

    Raises ConfigurationError as both do.
    """

    def __init__(
        self,
        num_pages: int,
        groups: "Sequence[KVGroup]",
        *,
        chunk_tokens: int,
        hands_out_first: bool = False,
        **options: Any,
    ) -> None:
        check_groups(groups)
        check_whole("chunk_tokens", chunk_tokens, least=1)
        self._page_tokens = groups[0].group.block_tokens // groups[0].group.device_blocks
        if chunk_tokens % self._page_tokens:
            raise ConfigurationError(
                f"chunk_tokens must be a multiple of the {self._page_tokens} tokens of a page, got {chunk_tokens}"
            )
        self._inserted: dict[Hashable, int] = {}  # tokens of running requests that the tree has
        RadixDevice.__init__(self, num_pages, chunk_tokens // self._page_tokens, hands_out_first=hands_out_first)
        Halves.__init__(self, self, groups, **options)

    def inserted(self, id: Hashable, pages: Numbers) -> None:
        """The tree has `pages`: those of a running request, from its first token on, after `placed`.

        Chunks that they fill are found by the request's keys from now on, and can be stored.

        Raises MisuseError as `keyed` does, and with `strict` for a request that does not run, and for pages other than
        those of the tree.
        """
        self._check_usable()
        if id not in self._running:
            self._unknown_request(id)
            return
        pages = numbers(pages)
        if self._strict:
            self.check_path(pages)
        self.keyed(self._running[id].keys, pages)
        self._inserted[id] = len(pages) * self._page_tokens

    def end_step(self) -> list[tuple[Hashable, int]]:
        """A step has ended, and its pages are inserted, if they are before the request ends.

        The requests whose loads have ended, each with the token from which on it computes: the boundary, or
        what was on the device when it was started if the load has failed.
        """
        return self._end_step(self._inserted)

    def end(self, id: Hashable, *, preempted: bool = False) -> None:
        """A request finished, was aborted or preempted. It still has its pages and locks, and the tree has what it has
        computed and is to keep.

        It may be loading. A preempted request may be started again at once.
        """
        self._end(id, self._inserted.pop(id, 0), preempted)
