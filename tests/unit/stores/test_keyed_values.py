"""Values that a rank puts into a shared store and takes out of it: names, frames, resets, and wrong values.

Blocks are numbered from 0 and lie one behind the other in host memory. Block n belongs to chunk n.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.messages.generations import FIRST as FIRST_GENERATION
from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.stores import frame, keyed_values
from cpu_prefix_cache.stores.deletions import CREDITS
from cpu_prefix_cache.stores.keyed_store import Got
from cpu_prefix_cache.stores.keyed_values import CALL_VALUES, CALLS, KeyedValues
from cpu_prefix_cache.testing import MemoryStore

SIZE, BLOCKS = 96, 200
POISON = 0xA5


class Recorder(MemoryStore):
    """Records its calls."""

    def __init__(self):
        super().__init__()
        self.registered = []
        self.puts = []
        self.gets = []
        self.deleted = []
        self.closed = 0

    def register(self, memory):
        self.registered.append(memory.nbytes)

    def put_from(self, keys, buffers, timeout):
        self.puts.append(len(keys))
        return super().put_from(keys, buffers, timeout)

    def get_into(self, keys, buffers, timeout):
        self.gets.append(len(keys))
        return super().get_into(keys, buffers, timeout)

    def delete(self, keys, timeout):
        self.deleted += keys
        super().delete(keys, timeout)

    def close(self):
        self.closed += 1


class Rank:
    """One process, with host memory of its own."""

    def __init__(self, store, revision="1", number=0, owners=1):
        space = Namespace((("revision", revision),))
        self.values = KeyedValues(store, space, number=number, owners=owners, slot_bytes=SIZE)
        self.memory = memoryview(bytearray(SIZE * BLOCKS))
        self.values.bind(self.memory)

    def view(self, block):
        return self.memory[block * SIZE : (block + 1) * SIZE]

    def fill(self, *blocks):
        for block in blocks:
            self.view(block)[:] = bytes((block + at) % 251 for at in range(SIZE))

    def write(self, *blocks, generation=FIRST_GENERATION, **label):
        self.values.write(blocks, [self.view(block) for block in blocks], labels(blocks, generation, **label))

    def read(self, *blocks, generation=FIRST_GENERATION, **label):
        """The blocks that are refused. All were poisoned before."""
        for block in blocks:
            self.view(block)[:] = bytes([POISON]) * SIZE
        return self.values.read(blocks, [self.view(block) for block in blocks], labels(blocks, generation, **label))

    def has(self, block):
        return bytes(self.view(block)) == bytes((block + at) % 251 for at in range(SIZE))


def labels(blocks, generation=FIRST_GENERATION, group=0, place=0, block=CHUNK):
    return [Label(b"chunk %d" % each, b"", group, place, block, generation) for each in blocks]


@pytest.fixture
def store():
    return Recorder()


@pytest.fixture
def filled(store):
    """Blocks 0 to 3 were put by another process."""
    writer = Rank(store)
    writer.fill(*range(4))
    writer.write(*range(4))
    return store


def test_another_process_reads_what_one_has_written(filled):
    reader = Rank(filled)
    assert reader.read(*range(4)) == []
    assert all(map(reader.has, range(4)))


def test_control_of_what_is_not_there_nothing_is_read(filled):
    reader = Rank(filled)
    assert reader.read(2, 3, 4) == [4]
    assert reader.has(2) and reader.has(3) and not reader.has(4)


@pytest.mark.parametrize("at", [0, 6, 16, 24, 32, 64, 96, frame.SIZE, frame.SIZE + SIZE - 1])
def test_a_value_that_has_changed_anywhere_is_refused_and_deleted(filled, at):
    name = Rank(filled).values.names.of_label(labels([2])[0])
    filled.values[name][at] ^= 1
    reader = Rank(filled)
    assert reader.read(*range(4)) == [2]
    assert filled.deleted == [name] and name not in filled.values
    assert reader.has(1) and reader.has(3)


@pytest.mark.parametrize("other", [{"group": 1}, {"place": 1}, {"block": 0}])
def test_the_value_of_another_piece_is_refused(filled, other):
    """A store that mixes up its keys."""
    names = Rank(filled).values.names
    (asked,) = labels([2], **other)
    filled.values[names.of_label(asked)] = filled.values[names.of_label(labels([2])[0])]
    reader = Rank(filled)
    assert reader.read(2, **other) == [2]
    assert reader.read(2) == []


def test_the_value_of_another_chunk_or_namespace_is_refused(filled):
    names, others = Rank(filled).values.names, Rank(filled, revision="2").values.names
    one, two = labels([1, 2])
    filled.values[names.of_label(one)] = filled.values[names.of_label(two)]
    filled.values[others.of_label(two)] = filled.values[names.of_label(two)]
    assert Rank(filled).read(1, 2) == [1]
    assert Rank(filled, revision="2").read(2) == [2]


@pytest.mark.parametrize("said", [{"revision": "2"}, {"owners": 2}, {"number": 1, "owners": 2}])
def test_others_have_names_of_their_own(filled, said):
    assert Rank(filled, **said).read(*range(4)) == [0, 1, 2, 3]


def test_values_that_could_not_be_deleted_are_refused_all_the_same(filled):
    def fails(keys, timeout):
        raise TimeoutError("too late")

    filled.delete = fails
    reader = Rank(filled)
    filled.values[reader.values.names.of_label(labels([2])[0])][-1] ^= 1
    assert reader.read(2, 3) == [2] and reader.has(3)


def test_missing_values_are_not_deleted(filled):
    """Another process may put it between our question and our DEL."""
    reader = Rank(filled)
    get = filled.get_into

    def get_while_another_puts(keys, buffers, timeout):
        got = get(keys, buffers, timeout)
        other = Rank(filled)
        other.fill(9)
        other.write(9)
        return got

    filled.get_into = get_while_another_puts
    assert reader.read(3, 9) == [9] and filled.deleted == []
    filled.get_into = get
    assert reader.read(9) == [] and reader.has(9)


def test_a_value_of_another_size_is_deleted(filled):
    name = Rank(filled).values.names.of_label(labels([2])[0])
    filled.values[name] += b"!"
    assert Rank(filled).read(*range(4)) == [2]
    assert filled.deleted == [name]


def test_a_machine_that_reads_nothing_but_wrong_bytes_soon_stops_deleting(store, caplog):
    rank = Rank(store)
    many = range(BLOCKS)
    rank.fill(*many)
    rank.write(*many)
    bad = Rank(store)
    get = store.get_into

    def get_with_bad_memory(keys, buffers, timeout):
        got = get(keys, buffers, timeout)
        for _, body in buffers[: len(keys)]:
            body[7] ^= 4
        return got

    store.get_into = get_with_bad_memory
    assert bad.read(*many) == list(many) and bad.read(*many) == list(many)
    assert len(store.deleted) == CREDITS and len(store.values) == BLOCKS - CREDITS
    # Values that it had deleted itself were missing the second time.
    assert bad.values.kept == 2 * (BLOCKS - CREDITS)
    assert caplog.text.count("too many values of the shared store came with wrong bytes") == 1
    store.get_into = get
    assert rank.read(*many[CREDITS:]) == [] and rank.values.kept == 0


def test_values_that_are_damaged_here_and_there_are_all_deleted(store):
    rank, many = Rank(store), range(BLOCKS)
    rank.fill(*many)
    rank.write(*many)
    for number in range(3 * CREDITS):
        store.values[rank.values.names.of_label(labels([number])[0])][-1] ^= 1
        assert rank.read(*many) == [number]
        rank.fill(number)
        rank.write(number)
    assert len(store.deleted) == 3 * CREDITS and rank.values.kept == 0


@pytest.mark.parametrize("got", [[True], [], [Got.READ] * 2])
def test_a_store_that_does_not_return_a_got_for_each_key_is_an_error(filled, got):
    filled.get_into = lambda keys, buffers, timeout: got
    with pytest.raises(MisuseError, match="returns a Got for each key"):
        Rank(filled).read(1)


def test_one_call_has_at_most_so_many_values(store):
    rank = Rank(store)
    many = range(2 * CALL_VALUES + 3)
    rank.fill(*many)
    rank.write(*many)
    rank.read(*many, 199)
    assert store.puts == [CALL_VALUES, CALL_VALUES, 3] and store.gets == [CALL_VALUES, CALL_VALUES, 4]
    assert all(map(rank.has, many)) and not rank.has(199)


def test_refused_values_of_every_call_are_reported(store):
    rank = Rank(store)
    many = range(2 * CALL_VALUES)
    rank.fill(*many)
    rank.write(*many)
    gone = [3, CALL_VALUES + 5]
    for label in labels(gone):
        del store.values[rank.values.names.of_label(label)]
    assert rank.read(*many) == gone


def test_values_that_are_not_taken_raise_an_error(store):
    store.put_from = lambda keys, buffers, timeout: [True, False, False]
    with pytest.raises(OSError, match="did not take 2 of 3 values"):
        Rank(store).write(0, 1, 2)


def test_a_key_that_no_frame_holds_is_refused_before_anything_is_put(store):
    rank = Rank(store)
    with pytest.raises(MisuseError, match="keys on disk have up to 32 bytes"):
        rank.values.write([0], [rank.view(0)], [labels([0])[0]._replace(key=b"k" * 33)])
    assert not store.puts


def test_calls_that_fail_keep_no_frames(store):
    """There are as many sets of frames as calls at once: one that is not given back would be waited for."""

    def fails(keys, buffers, timeout):
        raise ConnectionError("gone")

    rank = Rank(store)
    store.put_from = store.get_into = fails
    for _ in range(CALLS + 1):
        for call in (rank.write, rank.read):
            with pytest.raises(ConnectionError):
                call(0)


def test_threads_have_frames_of_their_own(store):
    """Each put waits until all have made their frames."""
    threads = 4
    barrier = threading.Barrier(threads)
    put = store.put_from

    def waits(keys, buffers, timeout):
        barrier.wait(10)
        return put(keys, buffers, timeout)

    store.put_from = waits
    rank = Rank(store)
    rank.fill(*range(threads))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(rank.write, range(threads)))
    reader = Rank(store)
    assert reader.read(*range(threads)) == [] and all(map(reader.has, range(threads)))


# resets


def test_after_a_reset_nothing_of_before_is_served_and_others_find_nothing_new(filled):
    rank, other = Rank(filled), Rank(filled)
    rank.values.advance(2 * FIRST_GENERATION)
    assert rank.values.floor == 2 * FIRST_GENERATION
    assert rank.read(0, 1, generation=2 * FIRST_GENERATION) == [0, 1]
    rank.fill(5)
    rank.write(5, generation=2 * FIRST_GENERATION)
    assert rank.read(5, generation=2 * FIRST_GENERATION) == [] and rank.has(5)
    assert other.read(5) == [5]
    assert other.read(0) == []


def test_each_reset_has_names_of_its_own(store):
    rank, names = Rank(store), set()
    for floor in range(3):
        names.add(rank.values.names.of_nothing)
        rank.values.advance((2 + floor) * FIRST_GENERATION)
    assert len(names) == 3


def test_a_write_that_was_queued_before_a_reset_puts_nothing(store):
    rank = Rank(store)
    rank.fill(0)
    rank.values.advance(2 * FIRST_GENERATION)
    with pytest.raises(OSError, match="from before a reset"):
        rank.write(0)
    assert not store.values


def test_a_write_that_was_under_way_at_a_reset_puts_nothing_under_the_new_names(store):
    rank = Rank(store)
    begun = threading.Event()
    goes_on = threading.Event()
    put = store.put_from

    def waits(keys, buffers, timeout):
        begun.set()
        assert goes_on.wait(10)
        return put(keys, buffers, timeout)

    store.put_from = waits
    many = range(CALL_VALUES + 1)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(rank.write, *many)
        assert begun.wait(10)
        old = rank.values.names
        rank.values.advance(2 * FIRST_GENERATION)
        goes_on.set()
        written.result(10)
    assert set(store.values) == {old.of_label(label) for label in labels(many)}
    assert rank.read(0, generation=2 * FIRST_GENERATION) == [0]


def test_reads_under_a_label_from_before_a_reset_are_refused(store):
    rank = Rank(store)
    rank.values.advance(2 * FIRST_GENERATION)
    rank.fill(0)
    rank.write(0, generation=2 * FIRST_GENERATION)
    assert rank.read(0) == [0]


# memory


def test_portions_of_memory_are_registered_once_when_they_are_used_and_frames_before_them(store, monkeypatch):
    monkeypatch.setattr(keyed_values, "PORTION_BYTES", 50 * SIZE)
    rank = Rank(store)
    frames = CALLS * CALL_VALUES * frame.SIZE
    assert store.registered == [frames]
    rank.write(49)
    assert store.registered == [frames, 50 * SIZE]
    rank.read(0, 49)
    assert len(store.registered) == 2
    rank.read(50, 199)
    assert store.registered == [frames, 50 * SIZE, 50 * SIZE, 50 * SIZE]


def test_the_last_portion_ends_with_the_memory(store, monkeypatch):
    monkeypatch.setattr(keyed_values, "PORTION_BYTES", 150 * SIZE)
    rank = Rank(store)
    rank.read(199)
    assert store.registered[1:] == [50 * SIZE]


def test_blocks_larger_than_a_portion_are_registered_one_by_one(store, monkeypatch):
    monkeypatch.setattr(keyed_values, "PORTION_BYTES", SIZE // 2)
    Rank(store).read(3, 4)
    assert store.registered[1:] == [SIZE, SIZE]


def test_the_store_is_closed_with_it(store):
    rank = Rank(store)
    rank.values.stop()
    assert store.closed == 1
    rank.values.close()
    assert store.closed == 2


# frames


def test_a_frame_has_its_fields_at_these_offsets():
    label = Label(b"key", b"parent", 3, 4, 5, 6)
    packed = frame.pack(label, b"n" * 32, 4096, b"c" * 16)
    assert len(packed) == frame.SIZE
    assert packed[:4] == b"FRM1" and packed[4:6] == b"\1\0" and packed[6] == 3 and packed[7] == 3
    assert packed[8:12] == b"\4\0\5\0" and packed[16:24] == (4096).to_bytes(8, "little")
    assert packed[24:56] == b"key" + bytes(29) and packed[56:88] == b"n" * 32 and packed[88:104] == b"c" * 16


@pytest.mark.parametrize("change", [{"key": b"kez"}, {"key": b"key\0"}, {"group": 0}, {"place": 0}, {"block": CHUNK}])
def test_frames_of_other_labels_differ(change):
    """Also where a key is another one with a zero at its end."""
    label = Label(b"key", b"parent", 3, 4, 5, 6)
    packs = {frame.pack(each, b"n" * 32, 4096, b"c" * 16) for each in (label, label._replace(**change))}
    assert len(packs) == 2


def test_the_writes_generation_and_parent_are_no_part_of_a_frame_or_name():
    """Others gave it another one."""
    label = Label(b"key", b"parent", 3, 4, 5, 6)
    other = label._replace(parent=b"", generation=7)
    assert frame.pack(label, b"", 1, b"") == frame.pack(other, b"", 1, b"")
    assert frame.Names(b"n" * 32).of_label(label) == frame.Names(b"n" * 32).of_label(other)


def test_names_are_texts_that_a_store_takes():
    names = frame.Names(bytes(range(32)))
    assert names.of(b"\xff" * 32, 3, 4, CHUNK) == f"cpc:{bytes(range(16)).hex()}:{'ff' * 32}:3.4.c"
    assert names.of(b"\0", 3, 4, 5).endswith(":00:3.4.5")
    assert names.of_nothing not in (names.of(b"", 0, 0, 0), names.of(b"", 0, 0, CHUNK))
