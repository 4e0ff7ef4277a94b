"""KeyedStore: values by key, on a server that others use too. An author of a store writes one; `check_store` tests it.

The store owns its space: it evicts when it likes, may keep an old value when a key is put again, and may lose what was
put. The cache owns the truth: it queries before it reads, and every value begins with a frame that identifies it
(`frame.py`), with a checksum. So a store needs no promise beyond that of a hash table that forgets.

All methods block, and are called by several threads at once, never by the one that decides.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum

Buffers = Sequence[memoryview]  # of one value: its bytes are those of the first buffer, then of the second, and so on


class Got(Enum):
    """A store's answer for one value. True if the value was read."""

    READ = "read"
    MISSING = "missing"
    OTHER_SIZE = "other size"  # or another kind: there is something under this key, which is no value of ours

    def __bool__(self) -> bool:
        return self is Got.READ


class KeyedStore(ABC):
    """A store made from a URL raises ConfigurationError where the operator must change the URL, or what it names; and
    OSError where the server may answer later: then the tier is paused, and the store is made again.

    Keys are texts of at most 255 ASCII letters, digits and ":.-". A value has as many bytes as its buffers.

    `timeout` is in seconds, for the whole call. A method raises OSError (TimeoutError, ConnectionError) when the server
    did not answer in time or refused the call as a whole. When it has returned or raised, it does not touch the buffers
    any more: a store that cannot give up a transfer waits for its end, also beyond the timeout.
    """

    @abstractmethod
    def register(self, memory: memoryview) -> None:
        """Buffers of later calls lie in this memory, which stays where it is until `close`. Most stores do nothing."""

    @abstractmethod
    def exists(self, keys: Sequence[str], timeout: float) -> list[bool]:
        """Whether the store has a value for each key now. It may be gone a moment later."""

    @abstractmethod
    def get_into(self, keys: Sequence[str], buffers: Sequence[Buffers], timeout: float) -> list[Got]:
        """Copy the value of each key into its buffers, if it is there and has exactly their size.

        Where it is not READ, the buffers hold anything. What has another size is deleted by the cache, which would find
        it for ever; what is missing is not, since another process may be putting it at that moment.
        """

    @abstractmethod
    def put_from(self, keys: Sequence[str], buffers: Sequence[Buffers], timeout: float) -> list[bool]:
        """Store each value. Whether the store took it; a key that it has already may keep its value."""

    @abstractmethod
    def delete(self, keys: Sequence[str], timeout: float) -> None:
        """Forget these keys, if they are there and the store can."""

    @abstractmethod
    def close(self) -> None:
        """End calls that are under way with OSError, if possible, and let the server go. May be called again."""
