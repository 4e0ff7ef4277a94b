"""Contract between the pool and an eviction policy."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from cpu_prefix_cache.index.forest import Forest


class EvictionPolicy(Protocol):
    """Decides which chunks are evicted. Sees the forest; knows no tokens and no bytes.

    What it keeps for each chunk is in `Forest.mark`, None where it keeps nothing. The life of a chunk:

        choose             is it worth its room?
        evict(n, keys)     room is made for chunks with these keys
        announced          they are being written to these blocks
        inserted           they can be found now; or `retired`: they never will be
        removed            they lose their key, by withdrawal; what `evict` returns has lost it already

    A reset replaces the forest, and the policy by one that `anew` returns.

    A request is one use, whatever its length. `admitted` returns its *touch*, the policy's own mark of that use, which
    the pool gives back with every chunk the request adds. Only a childless, unpinned chunk may be evicted (rule 3). The
    end of a transfer or of a request changes no order.
    """

    def admitted(self, deepest: int, keys: Sequence[bytes], now: float | None, next_use: float | None = None) -> Any:
        """A request used the prefix that ends at node `deepest` (NONE: it found nothing). Its touch.

        `keys` are those of all chunks of its prompt, here or not, and `now` is in seconds; empty and None for a touch
        without a request. `next_use` is a hint, which may be wrong: in so many seconds the prompt is used again;
        infinity: never.
        """

    def used_beside(self, nodes: Sequence[int]) -> None:
        """The request that was admitted last used these nodes, too, which are not above the one that it named.

        Blocks by keys alone call this. A policy without it evicts sides as if they were never used.
        """
        return

    def renewed(self, blocks: Sequence[int]) -> None:
        """These chunks have left the pool beside this one, in this order: none was used more recently."""
        return

    def choose(self, parent: int, incoming: Sequence[bytes], count: int, margin: float = 1.0) -> int:
        """How many of the chunks with these keys, from the first on, are worth what would have to leave for them.

        They are to hang below node `parent` (NONE: not known, it is being written), and `count` chunks would leave if
        all of them came. A policy that knows the worth of chunks requires `margin` times the worth of those that would
        leave. Changes nothing. All of them, unless a policy overrides it.
        """
        return len(incoming)

    def inserted(self, blocks: Sequence[int], touch: Any, *, ends_in_checkpoint: bool = False) -> None:
        """`blocks`, each below the one before it, were added by the request of this touch: chunks, and at the end
        perhaps a checkpoint.
        """

    def removed(self, block: int) -> None:
        """A chunk is about to lose its key, by withdrawal. All chunks below it have lost theirs."""

    def anew(self, forest: Forest) -> "EvictionPolicy":
        """A policy for this forest, which is empty, with what this one has learned. This one is used no more."""

    def bared(self, block: int) -> None:
        """The last of the withdrawn chunks below `block` is gone: it may leave again."""

    def evict(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        """Take the next `count` chunks out of the forest, childless ones first; fewer, if all others are pinned.

        `incoming`: the keys of the chunks that room is made for, parents first, if the caller knows them. The last
        `count` of them need the room, one chunk each; more are evicted after them if `count` is larger.
        """

    def announced(self, blocks: Sequence[int]) -> None:
        """The first chunks that were `incoming` in the last `evict` are being written to `blocks`, in that order. The
        others found no room.
        """
        return

    def retired(self, blocks: Sequence[int]) -> None:
        """Nothing that is being written to `blocks` will be inserted. Not all of them need to have been announced."""
        return

    def soonest_evicted(self) -> Iterator[int]:
        """The chunks in the order `evict` would take them now. Changes nothing; ends with the unpinned ones."""

    def check_valid(self) -> None:
        """Assert every rule the policy keeps. For tests."""


PolicyFactory = Callable[[Forest], EvictionPolicy]
