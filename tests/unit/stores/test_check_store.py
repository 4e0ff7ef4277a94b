"""`check_store` passes stores that keep their contract, and names the fault of each other one."""

import ctypes
import threading
import time

import pytest

from cpu_prefix_cache.stores.keyed_store import Got
from cpu_prefix_cache.testing import MemoryStore, check_store
from tests.unit.stores.client import Client
from tests.unit.stores.example_store import FolderStore

SMALL = dict(value_bytes=70_001, seconds=5.0)


def test_a_store_in_memory_keeps_the_contract():
    server = MemoryStore()
    check_store(lambda: Client(server), **SMALL)


def test_a_store_in_memory_evicts_only_for_what_has_no_room():
    store, seconds = MemoryStore(nbytes=10), 1.0
    for key in "abc":
        store.put_from([key], [[memoryview(bytearray(5))]], seconds)
        assert store.exists(["a", "b", "c"], seconds) == [key < "c", key >= "b", key == "c"]


def test_the_example_keeps_the_contract(tmp_path):
    check_store(lambda: FolderStore(f"folder://{tmp_path}"), **SMALL)


def test_a_store_may_keep_old_values_and_be_unable_to_delete():
    class KeepsOld(Client):
        def put_from(self, keys, buffers, timeout):
            there = self.server.exists(keys, timeout)
            new = [(key, each) for key, each, is_there in zip(keys, buffers, there, strict=True) if not is_there]
            self.server.put_from([key for key, _ in new], [each for _, each in new], timeout)
            return [True for _ in keys]

        def delete(self, keys, timeout):
            self.server.exists(keys, timeout)

    server = MemoryStore()
    check_store(lambda: KeepsOld(server), **SMALL, deletes=False)


# Stores that do one thing wrong


class OneByOne(Client):
    """A client of one value at a time, with `get` and `put`."""

    def get_into(self, keys, buffers, timeout):
        return [self.get(key, each, timeout) for key, each in zip(keys, buffers, strict=True)]

    def put_from(self, keys, buffers, timeout):
        return [self.put(key, each, timeout) for key, each in zip(keys, buffers, strict=True)]

    def get(self, key, buffers, timeout):
        return self.server.get_into([key], [buffers], timeout)[0]

    def put(self, key, buffers, timeout):
        return self.server.put_from([key], [buffers], timeout)[0]

    def value(self, key):
        return bytes(self.server.values.get(key, b""))

    def got(self, key, fits):
        return Got.MISSING if not self.value(key) else Got.READ if fits else Got.OTHER_SIZE


def fill(buffers, value):
    for each in buffers:
        part = value[: len(each)]
        each[: len(part)], value = part, value[len(part) :]


class ServesShorter(OneByOne):  # tiers 1: what was not written is what lay there before
    def get(self, key, buffers, timeout):
        fill(buffers, self.value(key))
        return self.got(key, len(self.value(key)) <= sum(map(len, buffers)))


class ServesLonger(OneByOne):  # tiers 3
    def get(self, key, buffers, timeout):
        fill(buffers, self.value(key))
        return self.got(key, len(self.value(key)) >= sum(map(len, buffers)))


class SaysItIsThere(OneByOne):
    def get(self, key, buffers, timeout):
        super().get(key, buffers, timeout)
        return Got.READ


class AnswersYesAndNo(OneByOne):  # as stores did before there was Got
    def get(self, key, buffers, timeout):
        return bool(super().get(key, buffers, timeout))


class CallsWhatIsMissingAnother(OneByOne):
    def get(self, key, buffers, timeout):
        return super().get(key, buffers, timeout) or Got.OTHER_SIZE


class CallsAnotherMissing(OneByOne):
    def get(self, key, buffers, timeout):
        return super().get(key, buffers, timeout) or Got.MISSING


def overrun(buffer):
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + len(buffer), 0, 2)


class WritesBeyond(OneByOne):
    def get(self, key, buffers, timeout):
        there = super().get(key, buffers, timeout)
        overrun(buffers[-1])
        return there


class WritesBeyondForOtherSizes(OneByOne):
    def get(self, key, buffers, timeout):
        there = super().get(key, buffers, timeout)
        if there is Got.OTHER_SIZE:
            overrun(buffers[-1])
        return there


class SwapsBuffers(OneByOne):
    def put(self, key, buffers, timeout):
        return super().put(key, buffers[::-1], timeout)


class TakesTheFirstBuffer(OneByOne):
    def put(self, key, buffers, timeout):
        return super().put(key, buffers[:1], timeout)


class EndsAtALine(OneByOne):
    def put(self, key, buffers, timeout):
        return super().put(key, [memoryview(b"".join(buffers).partition(b"\n")[0])], timeout)


class ShortensKeys(OneByOne):
    def get(self, key, buffers, timeout):
        return super().get(key[:254], buffers, timeout)

    def put(self, key, buffers, timeout):
        return super().put(key[:254], buffers, timeout)


class FoldsCase(OneByOne):
    def get(self, key, buffers, timeout):
        return super().get(key.lower(), buffers, timeout)

    def put(self, key, buffers, timeout):
        return super().put(key.lower(), buffers, timeout)

    def exists(self, keys, timeout):
        return super().exists([key.lower() for key in keys], timeout)


class KeepsBuffers(OneByOne):
    """It remembers where a value was, instead of the value."""

    def put(self, key, buffers, timeout):
        there = super().put(key, buffers, timeout)
        self.server.buffers = {**vars(self.server).get("buffers", {}), key: list(buffers)}
        return there

    def value(self, key):
        return b"".join(self.server.buffers.get(key, ()))

    def get(self, key, buffers, timeout):
        there = super().get(key, buffers, timeout)
        fill(buffers, self.value(key) if there else b"")
        return there


class WritesLate(OneByOne):
    def get(self, key, buffers, timeout):
        there, value = super().get(key, buffers, timeout), self.value(key)
        threading.Timer(0.01, lambda: fill(buffers, value)).start()
        return there


class PutsInHalves(OneByOne):  # tiers 24: a reader meets the next value half way
    def put(self, key, buffers, timeout):
        new, old = b"".join(buffers), self.value(key)
        if len(old) == len(new):
            self.server.put_from([key], [[memoryview(new[:90] + old[90:])]], timeout)
            time.sleep(0.001)
        return super().put(key, buffers, timeout)


class SharesOneBuffer(OneByOne):
    """Whatever a thread reads, all read."""

    between = bytearray(1 << 20)

    def get(self, key, buffers, timeout):
        value = self.value(key)
        self.between[: len(value)] = value
        time.sleep(0.0005)
        there = super().get(key, buffers, timeout)
        if there:
            fill(buffers, bytes(self.between[: len(value)]))
        return there


class GivesTheLateAnswerToTheNext(OneByOne):  # tiers 28
    late = ()

    def get(self, key, buffers, timeout):
        if timeout < 1e-3:
            self.late = (self.value(key),)
            raise TimeoutError
        late, self.late = self.late, ()
        if late and len(late[0]) == sum(map(len, buffers)):
            fill(buffers, late[0])
            return Got.READ
        return super().get(key, buffers, timeout)


class StopsAtTheFirstMiss(Client):
    def get_into(self, keys, buffers, timeout):
        got = super().get_into(keys, buffers, timeout)
        first = [*map(bool, got), False].index(False)
        return [each if at <= first else Got.MISSING for at, each in enumerate(got)]


class ReadsTheFirstOfABatch(Client):
    def get_into(self, keys, buffers, timeout):
        super().get_into(keys[:64], buffers[:64], timeout)
        return [Got.READ if each else Got.MISSING for each in super().exists(keys, timeout)]


class NeedsKeys(Client):
    def get_into(self, keys, buffers, timeout):
        assert keys, "no keys"
        return super().get_into(keys, buffers, timeout)


class AllOrNone(Client):
    def exists(self, keys, timeout):
        return [any(super().exists(keys, timeout))] * len(keys)


class AnswersInAnyOrder(Client):
    def exists(self, keys, timeout):
        return sorted(super().exists(keys, timeout))


class ForgetsNothing(Client):
    def delete(self, keys, timeout):
        self.server.exists(keys, timeout)


class ForgetsAll(Client):
    def delete(self, keys, timeout):
        self.server.delete(list(self.server.values), timeout)


class FailsToDeleteWhatIsNotThere(Client):
    def delete(self, keys, timeout):
        assert not keys or any(self.server.exists(keys, timeout)), "nothing to delete"
        super().delete(keys, timeout)


class LosesAll(Client):
    def put_from(self, keys, buffers, timeout):
        return [True for _ in keys]


class IsItsOwn(Client):
    def __init__(self, server):
        super().__init__(MemoryStore())


class GoesOn(Client):
    def close(self):
        """It is closed, and serves."""


class EndsOnce(Client):
    def close(self):
        assert not self._closed, "closed twice"
        super().close()


@pytest.mark.parametrize(
    ("store", "told"),
    [
        (ServesShorter, "served a value of"),
        (ServesLonger, "served a value of"),
        (SaysItIsThere, "never put"),
        (AnswersYesAndNo, "READ, MISSING or OTHER_SIZE"),
        (CallsWhatIsMissingAnother, "never put MISSING"),
        (CallsAnotherMissing, "MISSING to one who wants"),
        (WritesBeyond, "beyond the buffers"),
        (WritesBeyondForOtherSizes, "beyond the buffers"),
        (SwapsBuffers, "come back"),
        (TakesTheFirstBuffer, "come back"),
        (EndsAtALine, "come back"),
        (ShortensKeys, "255|are one|exists does not"),
        (FoldsCase, "are one"),
        (KeepsBuffers, "changed with its buffer|come back|is another"),
        (WritesLate, "when it had returned|beyond the buffers|another|others|are one"),  # which check, time decides
        (PutsInHalves, "neither the old nor the new"),
        (SharesOneBuffer, "at once"),
        (GivesTheLateAnswerToTheNext, "not its own value"),
        (StopsAtTheFirstMiss, "not all there"),
        (ReadsTheFirstOfABatch, "in one call, some are others|served a value"),
        (NeedsKeys, "no keys"),
        (AllOrNone, "not all there"),
        (AnswersInAnyOrder, "not all there|exists"),
        (ForgetsNothing, "delete left a key"),
        (ForgetsAll, "took another"),
        (FailsToDeleteWhatIsNotThere, "nothing to delete"),
        (LosesAll, "exists does not see"),
        (IsItsOwn, "another store does not see"),
        (GoesOn, "after close"),
        (EndsOnce, "closed twice"),
    ],
)
def test_a_fault_is_found_and_named(store, told):
    server = MemoryStore()
    with pytest.raises(AssertionError, match=told):
        check_store(lambda: store(server), **SMALL)
