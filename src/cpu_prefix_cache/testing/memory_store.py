"""A store in the memory of this process: for tests, and for several engines in one process."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from cpu_prefix_cache.stores.keyed_store import Buffers, Got, KeyedStore


class MemoryStore(KeyedStore):
    """Holds at most `nbytes` bytes of values, and evicts those that were used longest ago."""

    def __init__(self, nbytes: int = 1 << 30) -> None:
        self._lock, self._nbytes, self._used = threading.Lock(), nbytes, 0
        self.values: OrderedDict[str, bytearray] = OrderedDict()

    def register(self, memory: memoryview) -> None:
        pass

    def exists(self, keys: Sequence[str], timeout: float) -> list[bool]:
        with self._lock:
            return [key in self.values for key in keys]

    def get_into(self, keys: Sequence[str], buffers: Sequence[Buffers], timeout: float) -> list[Got]:
        with self._lock:
            return [self._get(key, each) for key, each in zip(keys, buffers, strict=True)]

    def put_from(self, keys: Sequence[str], buffers: Sequence[Buffers], timeout: float) -> list[bool]:
        with self._lock:
            return [self._put(key, each) for key, each in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[str], timeout: float) -> None:
        with self._lock:
            for key in keys:
                self._used -= len(self.values.pop(key, b""))

    def close(self) -> None:
        pass

    def _get(self, key: str, buffers: Buffers) -> Got:
        value = self.values.get(key)
        if value is None:
            return Got.MISSING
        if len(value) != sum(each.nbytes for each in buffers):
            return Got.OTHER_SIZE
        self.values.move_to_end(key)
        rest = memoryview(value)
        for each in buffers:
            each[:] = rest[: each.nbytes]
            rest = rest[each.nbytes :]
        return Got.READ

    def _put(self, key: str, buffers: Buffers) -> bool:
        value = bytearray(b"".join(buffers))
        if len(value) > self._nbytes:
            return False
        self._used += len(value) - len(self.values.pop(key, b""))
        self.values[key] = value
        while self._used > self._nbytes:
            self._used -= len(self.values.popitem(last=False)[1])
        return True
