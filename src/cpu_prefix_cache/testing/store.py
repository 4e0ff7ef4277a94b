"""Contract of a KeyedStore, as a check that its author runs against a real server.

    def test_my_store(server):
        check_store(lambda: MyStore(server.url))

Each check is a story of some calls. Buffers lie in memory of which every byte is known: poison where nothing was
written, so that a byte which did not come, came late or went beyond its buffer is seen.
"""

import mmap
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from cpu_prefix_cache.stores.keyed_store import Got, KeyedStore

POISON = 0xEE
GAP = 61  # bytes between buffers; not a power of two, so that buffers begin anywhere
ARENA_BYTES, ARENA_VALUES = 8 << 20, 8  # for small values, and for the largest
LATE_SECONDS = 0.05  # after a call, for what a store does when it should not any more
HARD = b"\r\n$-1\r\n\0-ERR\r\n"  # each value begins with what looks like an end, or like an error
MANY, THREADS, ROUNDS = 300, 8, 20


def check_store(
    make: Callable[[], KeyedStore],
    *,
    value_bytes: int = 1 << 20,
    seconds: float = 10.0,
    shared: bool = True,
    deletes: bool = True,
) -> None:
    """Raises AssertionError, with a sentence, when a store that `make` opens breaks its contract.

    `value_bytes` is the size of the largest values; `seconds` the timeout of each call. With `shared`, two stores that
    `make` opens at once must find each other's values. `deletes` off: it cannot delete.
    """
    memory = memoryview(mmap.mmap(-1, ARENA_BYTES + ARENA_VALUES * value_bytes))
    store = make()
    store.register(memory)
    for check in CHECKS:
        check(_Story(store, memory, value_bytes, seconds))
    if deletes:
        _deletes(_Story(store, memory, value_bytes, seconds))
    if shared:
        other = make()
        other.register(memory)
        _is_shared(_Story(store, memory, value_bytes, seconds), other)
        other.close()
    _ends(_Story(store, memory, value_bytes, seconds))


class _Story:
    """A store, keys that nobody had before, and memory that is poisoned but for the buffers taken from it."""

    def __init__(self, store: KeyedStore, memory: memoryview, value_bytes: int, seconds: float) -> None:
        self.store, self.value_bytes, self.seconds = store, value_bytes, seconds
        self._memory, self._end, self._name = memory, GAP, uuid.uuid4().hex
        self._gaps: list[slice] = []
        memory[:] = bytes([POISON]) * len(memory)

    def key(self, name: object) -> str:
        return f"{self._name}:{name}"

    def buffers(self, *sizes: int) -> list[memoryview]:
        """Poisoned, of these sizes."""
        return [self._buffer(size) for size in sizes]

    def filled(self, value: bytes, *sizes: int) -> list[memoryview]:
        """Buffers of these sizes, filled with this value."""
        buffers = self.buffers(*sizes)
        _fill(buffers, value)
        return buffers

    def put(self, name: object, value: bytes, *sizes: int) -> None:
        """A value that must be taken, from buffers that hold something else when the call is over."""
        buffers = self.filled(value, *(sizes or (len(value),)))
        put = self.store.put_from([self.key(name)], [buffers], self.seconds)
        assert list(put) == [True], f"put_from did not take a value of {len(value)} bytes: {put}"
        assert b"".join(buffers) == value, "put_from changed its buffers"
        _fill(buffers, bytes(len(value)))

    def get(self, name: object, *sizes: int) -> bytes | None:
        """The value, if buffers of these sizes got one."""
        buffers = self.buffers(*sizes)
        (got,) = self.store.get_into([self.key(name)], [buffers], self.seconds)
        assert isinstance(got, Got), (
            f"get_into answers READ, MISSING or OTHER_SIZE of Got for each key, and not {got!r}"
        )
        return b"".join(buffers) if got else None

    def got(self, name: object, *sizes: int) -> Got:
        """The store's answer for the value, to buffers of these sizes."""
        (got,) = self.store.get_into([self.key(name)], [self.buffers(*sizes)], self.seconds)
        return got

    def exist(self, *names: object) -> list[bool]:
        return list(self.store.exists([self.key(name) for name in names], self.seconds))

    def check_gaps(self) -> None:
        """Nothing was written between the buffers."""
        for gap in (*self._gaps, slice(self._end - GAP, None)):
            part = self._memory[gap]
            assert part == bytes([POISON]) * len(part), "bytes beyond the buffers were written"

    def _buffer(self, size: int) -> memoryview:
        begin, self._end = self._end, self._end + size + GAP
        self._gaps.append(slice(begin - GAP, begin))
        return self._memory[begin : begin + size]


def _value(seed: object, nbytes: int) -> bytes:
    return (HARD + random.Random(repr(seed)).randbytes(nbytes))[:nbytes]


def _fill(buffers: Sequence[memoryview], value: bytes) -> None:
    for buffer in buffers:
        buffer[:], value = value[: len(buffer)], value[len(buffer) :]


def _comes_back(story: _Story) -> None:
    """Checks values of several buffers, no size or place a power of two, also into others of the same sum."""
    for sizes, others in [
        ((96, story.value_bytes), (story.value_bytes, 96)),
        ((1,), (1,)),
        ((13, 4097, 1, 65537), (65537, 4111)),
    ]:
        value = _value(sizes, sum(sizes))
        story.put(sizes, value, *sizes)
        assert story.exist(sizes) == [True], "exists does not see what was put"
        assert story.get(sizes, *sizes) == value, f"buffers of {sizes} bytes did not come back as they were put"
        assert story.get(sizes, *others) == value, f"{sizes} bytes came back otherwise in buffers of {others}"
    story.check_gaps()


def _misses(story: _Story) -> None:
    assert story.get("nothing", 100) is None, "get_into found a key that was never put"
    assert story.got("nothing", 100) is Got.MISSING, "get_into does not call a key that was never put MISSING"
    assert story.exist("nothing") == [False], "exists says yes to a key that was never put"
    story.check_gaps()


def _refuses_other_sizes(story: _Story) -> None:
    for nbytes in (1000, story.value_bytes):
        story.put(nbytes, _value(nbytes, nbytes))
        for other in (1, nbytes - 1, nbytes + 1, nbytes + 50_000):
            there = story.get(nbytes, other)
            assert there is None, f"get_into served a value of {nbytes} bytes as one of {other}"
            got = story.got(nbytes, other)
            assert got is Got.OTHER_SIZE, f"get_into calls a value of {nbytes} bytes {got} to one who wants {other}"
        assert story.get(nbytes, nbytes) == _value(nbytes, nbytes), "after gets of other sizes, a value is another"
    story.check_gaps()


def _takes_batches(story: _Story) -> None:
    assert list(story.store.exists([], story.seconds)) == [], "exists of no keys"
    assert list(story.store.get_into([], [], story.seconds)) == [], "get_into of no keys"
    assert list(story.store.put_from([], [], story.seconds)) == [], "put_from of no keys"
    story.store.delete([], story.seconds)
    sizes = [17 + at for at in range(MANY)]
    keys, values = [story.key(at) for at in range(MANY)], [_value(at, size) for at, size in enumerate(sizes)]
    sources = [story.filled(value, 7, len(value) - 7) for value in values]
    assert all(story.store.put_from(keys, sources, story.seconds)), f"put_from did not take all of {MANY} values"
    into = [story.buffers(size) for size in sizes]
    assert all(story.store.get_into(keys, into, story.seconds)), f"get_into did not find all of {MANY} values"
    assert [bytes(each) for (each,) in into] == values, f"of {MANY} values in one call, some are others"
    story.check_gaps()


def _tells_mixes_apart(story: _Story) -> None:
    """In one call: keys that are there, keys that are not, values of another size."""
    for name in ("a", "c", "long", "e"):
        story.put(name, _value(name, 200 if name == "long" else 100))
    names = ["nothing", "a", "b", "c", "long", "d", "e"]
    assert story.exist(*names) == [name in ("a", "c", "long", "e") for name in names], "exists of keys, not all there"
    assert story.exist("a", "c", "e") == [True] * 3, "exists of keys that are all there"
    assert story.exist("b", "d") == [False] * 2, "exists of keys of which none is there"
    into = [story.buffers(40, 60) for _ in names]
    there = list(story.store.get_into([story.key(name) for name in names], into, story.seconds))
    expected = [name in ("a", "c", "e") for name in names]
    assert list(map(bool, there)) == expected, f"get_into of keys, not all there, says {there}"
    for name, is_there, buffers in zip(names, there, into, strict=True):
        assert not is_there or b"".join(buffers) == _value(name, 100), (
            f"beside keys that are missing, {name} is another"
        )
    story.check_gaps()


def _knows_all_keys(story: _Story) -> None:
    longest = story.key("0123456789-ABCDEFGHIJKLMNOPQRSTUVWXYZ.abcdefghijklmnopqrstuvwxyz:").ljust(254, "-")
    keys = [longest + end for end in "aAbz0.-:"] + [longest, longest[:100]]
    values = [story.filled(_value(key, 50), 50) for key in keys]
    assert all(story.store.put_from(keys, values, story.seconds)), "a key of 255 characters was not taken"
    into = [story.buffers(50) for _ in keys]
    assert all(story.store.get_into(keys, into, story.seconds)), "a key of 255 characters was not found"
    assert [bytes(each) for (each,) in into] == [_value(key, 50) for key in keys], "keys that differ are one"
    story.check_gaps()


def _is_done_when_it_returns(story: _Story) -> None:
    story.put("key", _value("key", story.value_bytes))
    (buffer,) = story.buffers(story.value_bytes)
    assert all(story.store.get_into([story.key("key")], [[buffer]], story.seconds)), "a value was lost"
    buffer[:] = bytes(len(buffer))
    time.sleep(LATE_SECONDS)
    assert buffer == bytes(len(buffer)), "get_into wrote to a buffer when it had returned"
    assert story.get("key", story.value_bytes) == _value("key", story.value_bytes), "a value changed with its buffer"


def _puts_again(story: _Story) -> None:
    """While one thread puts other values, each get has one of them, whole."""
    nbytes = story.value_bytes
    values = [_value(at, nbytes) for at in range(2)]
    sources = [story.filled(value, 96, nbytes - 96) for value in values]
    (into,) = story.buffers(nbytes)
    story.put("key", values[0])

    def put() -> None:
        for source in sources * ROUNDS:
            story.store.put_from([story.key("key")], [source], story.seconds)

    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(put)
        while not putting.done():
            (there,) = story.store.get_into([story.key("key")], [[into]], story.seconds)
            assert not there or bytes(into) in values, "a value is neither the old nor the new one"
        putting.result()
    story.check_gaps()


def _serves_threads(story: _Story) -> None:
    jobs = [(thread, story.buffers(1000, 20_001), story.buffers(1000, 20_001)) for thread in range(THREADS)]
    wait = threading.Barrier(THREADS)

    def work(job: tuple[int, list[memoryview], list[memoryview]]) -> None:
        thread, source, into = job
        wait.wait()
        for at in range(ROUNDS):
            key, value = story.key(f"{thread}.{at}"), _value((thread, at), 21_001)
            _fill(source, value)
            _fill(into, bytes([POISON]) * 21_001)
            assert list(story.store.put_from([key], [source], story.seconds)) == [True], "a value was not taken"
            assert list(story.store.exists([key], story.seconds)) == [True], "a value was lost"
            assert all(story.store.get_into([key], [into], story.seconds)), "a value was lost"
            assert b"".join(into) == value, f"with {THREADS} threads at once, a value is another"

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, jobs))
    story.check_gaps()


def _survives_timeouts(story: _Story) -> None:
    """A call that has no time raises OSError, or was fast; the next has its own answers."""
    for name in ("a", "b"):
        story.put(name, _value(name, story.value_bytes))
    into, other = story.buffers(story.value_bytes, story.value_bytes)
    for at in range(ROUNDS):
        with suppress(OSError):
            got = story.store.get_into([story.key("a")], [[into]], 1e-4 * 2 ** (at // 4) * (at % 4))
            assert not all(got) or into == _value("a", story.value_bytes), "a value got in no time is another"
        assert story.exist("b", "nothing") == [True, False], "after a call that timed out, exists is wrong"
        got = story.store.get_into([story.key("b")], [[other]], story.seconds)
        is_own = all(got) and other == _value("b", story.value_bytes)
        assert is_own, "after a call that timed out, the next has not its own value"
    story.check_gaps()


def _deletes(story: _Story) -> None:
    story.store.delete([story.key("nothing")], story.seconds)
    for name in ("a", "b", "c"):
        story.put(name, _value(name, 100))
    story.store.delete([story.key("a"), story.key("nothing"), story.key("c")], story.seconds)
    assert story.exist("a", "b", "c") == [False, True, False], "delete left a key, or took another"
    assert story.get("a", 100) is None, "a key that was deleted has a value"
    story.put("a", _value("new", 100))
    assert story.get("a", 100) == _value("new", 100), "a key that was deleted and put again has its old value"


def _is_shared(story: _Story, other: KeyedStore) -> None:
    story.put("key", _value("key", 5000), 1000, 4000)
    into = story.buffers(5000)
    assert list(other.exists([story.key("key")], story.seconds)) == [True], "another store does not see what was put"
    assert all(other.get_into([story.key("key")], [into], story.seconds)), "another store cannot get it"
    assert bytes(into[0]) == _value("key", 5000), "another store gets another value"


def _ends(story: _Story) -> None:
    story.put("key", _value("key", 100))
    story.store.close()
    story.store.close()
    calls: list[Callable[[], object]] = [
        lambda: story.exist("key"),
        lambda: story.get("key", 100),
        lambda: story.put("key", bytes(100)),
        lambda: story.store.delete([story.key("key")], story.seconds),
    ]
    for call in calls:
        try:
            call()
        except OSError:
            continue
        raise AssertionError("after close, a call did not raise OSError")


CHECKS: tuple[Callable[[_Story], None], ...] = (
    _comes_back,
    _misses,
    _refuses_other_sizes,
    _takes_batches,
    _tells_mixes_apart,
    _knows_all_keys,
    _is_done_when_it_returns,
    _puts_again,
    _serves_threads,
    _survives_timeouts,
)
