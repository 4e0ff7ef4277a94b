"""Engines on the pool of a keeper that is a process of its own: what they find of each other, and all its bytes."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpu_prefix_cache import ConfigurationError, HostCache, MisuseError, NodePool, Pending, Prefix, Window
from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.deciding import HybridChunkPlanner, PooledDevice, PrefixGroup
from cpu_prefix_cache.keeper import questions
from cpu_prefix_cache.keeper.protocol import HEADER, VERSION, Kind, Message, ProtocolError, Received, encoded
from cpu_prefix_cache.keeper.shape import spelled
from cpu_prefix_cache.kv_layout import keys_and_values
from cpu_prefix_cache.memory import shared_file
from cpu_prefix_cache.messages.tier import KEY_BYTES
from cpu_prefix_cache.node import region as regions
from cpu_prefix_cache.node import server as servers
from cpu_prefix_cache.node.server import Server
from cpu_prefix_cache.pool.coordinator import new_pool
from cpu_prefix_cache.testing import CorruptingCopier, MeddlingCopier
from tests.support.host_engine import CHUNK_BYTES, GRID, PATIENCE, keys_of
from tests.support.host_options import with_options
from tests.support.small_engine import SmallEngine
from tests.support.threads import wait_until
from tests.unit.keeper.pool_engine import ROOT, KeeperProcess, PoolEngine

pytestmark = pytest.mark.usefixtures("patience")

SHAPE = spelled(HybridChunkPlanner([PrefixGroup(name="full", block_tokens=GRID, block_bytes=24)], max_model_len=100))


def hello(block_bytes=CHUNK_BYTES, number=0, shape=SHAPE, version=VERSION):
    return encoded(Message(Kind.HELLO, 0, (block_bytes, number, *shape), (b"n" * 16,)), version)


HELLO = hello()


@pytest.fixture
def keeper(tmp_path):
    with KeeperProcess(tmp_path) as process:
        yield process


class HeldCopier(MeddlingCopier):
    """A copy is made at once, and has ended when `may_end` is set."""

    may_end = threading.Event()

    def __init__(self, copier, tensors):
        super().__init__(copier)
        self.may_end.clear()

    def copy(self, direction, copies):
        super().copy(direction, copies)
        return Held()


class Held(Event):
    def passed(self):
        return HeldCopier.may_end.is_set()

    def until_passed(self):
        HeldCopier.may_end.wait(PATIENCE)


def finds_again(engine, prompt):
    """Serve until something was loaded: a keeper has come back."""
    loaded = []

    def served():
        loaded.append(engine.serves(prompt))
        engine.rests()
        engine.forgets()
        return loaded[-1]

    wait_until(served)
    return loaded[-1]


def test_an_engine_loads_what_another_one_has_computed(keeper):
    with PoolEngine(keeper.address) as one, PoolEngine(keeper.address) as other:
        one.stores("abcdef")
        assert [other.serves(prompt) for prompt in ("abcdef", "xyz")] == [6, 0]
        other.rests()
        assert one.serves("abcxyz") == 3
        other.forgets()
        assert other.serves("xyz") == 3


def looks_up(engine, id, prompt, blocks=()):
    """One `start`, which fills `blocks` if it may."""
    keys = keys_of(prompt)
    return engine.host.start(
        id, keys, num_tokens=len(keys) * GRID + 1, on_device=0, allocate=lambda start, end: blocks[: end // GRID]
    )


def test_a_request_with_the_id_of_one_that_went_away_gets_no_chunk_of_it(keeper):
    with PoolEngine(keeper.address) as one, PoolEngine(keeper.address) as other:
        one.stores("abcd")
        one.stores("wxyz")
        assert isinstance(looks_up(other, "7", "abcd"), Pending)
        wait_until(lambda: other.steps() or other.host.cache._questions._of["7"].leased is not None)
        request = other.blocks.take(keys_of("wxyz"), 0, ())  # its client went away, and the next one has its number
        wait_until(lambda: other.steps() or not isinstance(looks_up(other, "7", "wxyz", request.blocks), Pending))
        wait_until(lambda: other.steps() or not other.host.is_busy)
        assert all(map(other.is_right, request.blocks, keys_of("wxyz")))
        other.host.end("7", 0)


def test_an_engine_at_rest_has_no_lease(tmp_path):
    with (
        KeeperProcess(tmp_path, slots=4) as keeper,
        PoolEngine(keeper.address) as one,
        PoolEngine(keeper.address) as other,
    ):
        one.stores("abcd")
        assert isinstance(looks_up(other, "7", "abcd"), Pending)  # its client went away
        wait_until(lambda: other.host.cache._messenger._answers)
        other.rests()

        def has_room():  # once the keeper has read that the other one's lease has ended
            one.stores("wxyz")
            return one.serves("wxyz") == 4

        wait_until(has_room)


def test_a_byte_that_differs_shows(keeper):
    """The control of the test above."""
    with PoolEngine(keeper.address) as one, PoolEngine(keeper.address, wrap_copier=CorruptingCopier) as other:
        one.stores("abcdef")
        with pytest.raises(AssertionError, match="hold other bytes"):
            other.serves("abcdef")


def test_all_blocks_of_the_device_are_free_at_the_end(keeper):
    with PoolEngine(keeper.address) as engine:
        for prompt in ("abc", "abd", "abc"):
            engine.stores(prompt)
        assert engine.is_whole
        now = engine.host.statistics().cache
        assert now.running == now.storing == now.loading == 0
        assert (now.chunks_stored, now.chunks_loaded) == (4, 5)


def test_engines_of_other_weights_do_not_meet(keeper):
    with PoolEngine(keeper.address) as one, PoolEngine(keeper.address, revision="2", weights=2) as other:
        one.stores("abc")
        assert other.serves("abc") == 0  # else its bytes would be wrong
        other.rests()
        assert other.is_right(other.blocks.find(keys_of("abc")[0])[0], keys_of("abc")[0])


def test_after_a_reset_engines_meet_again_at_the_same_revision(keeper):
    with PoolEngine(keeper.address) as one, PoolEngine(keeper.address) as other:
        one.stores("abc")
        one.host.reset("2")
        one.weights = 2
        assert one.serves("abc") == 0
        one.rests()
        one.forgets()
        assert other.serves("abc") == 3
        other.rests()
        other.forgets()
        other.host.reset("2")
        other.weights = 2
        assert other.serves("abc") == 3
        other.rests()
        other.forgets()
        other.host.reset()  # nobody knows these weights
        other.weights = 3
        assert other.serves("abc") == 0


def test_a_pool_that_is_full_goes_on(tmp_path):
    with (
        KeeperProcess(tmp_path, slots=6) as keeper,
        PoolEngine(keeper.address) as one,
        PoolEngine(keeper.address) as two,
    ):
        for number in range(20):
            one.stores(chr(500 + number) + "abc")
            two.stores(chr(510 + number) + "abc")
        assert one.serves(chr(529) + "abc") == 4
        assert one.serves(chr(500) + "abc") == 0, "more slots than the keeper was given memory for"


def test_an_engine_that_ends_leaves_what_it_has_stored(keeper):
    with PoolEngine(keeper.address) as one:
        one.stores("abc")
    with PoolEngine(keeper.address) as other:
        assert other.serves("abc") == 3


# The keeper goes


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_keeper_gets_the_memory_back_from_the_engines(keeper, sign):
    with PoolEngine(keeper.address) as one, PoolEngine(keeper.address) as other:
        one.stores("abcdef")
        keeper.kill(sign)
        wait_until(lambda: not other.host.cache._messenger.is_up)  # else it waits for an answer, and long, here
        wait_until(lambda: other.serves("xy") == 0 and not other.host.is_busy)  # computed
        other.forgets()
        keeper.start()
        assert finds_again(other, "abcdef") == 6
        wait_until(lambda: one.host.cache._messenger.is_up)
        # what is computed before the keeper hands out slots again is not stored
        wait_until(lambda: one.stores("abcdefgh") or finds_again(other, "abcdefgh") == 8)


def test_a_lease_is_loaded_without_a_keeper(keeper):
    with PoolEngine(keeper.address) as one, PoolEngine(keeper.address) as other:
        one.stores("abc")
        steps = other.steps

        def killing():
            """The keeper is killed between its answer and the load."""
            cache, other.steps = other.host.cache, steps
            wait_until(lambda: cache.passed(time.monotonic()) or cache._questions._of["abc"].leased is not None)
            keeper.kill()
            wait_until(lambda: not cache._messenger.is_up)
            steps()

        other.steps = killing
        assert other.serves("abc") == 3
        keeper.start()


def under_way(engine, prompt):
    """Serve a prompt, and step until its store is under way."""
    engine.serves(prompt)
    wait_until(lambda: engine.steps() or engine.host.cache._messenger._uses)


def test_an_engine_comes_back_when_its_last_copy_has_ended(keeper):
    with PoolEngine(keeper.address, wrap_copier=HeldCopier) as engine:
        messenger = engine.host.cache._messenger
        under_way(engine, "abc")
        assert messenger._uses == 1
        keeper.kill()
        keeper.start()
        time.sleep(0.5)
        assert not messenger.is_up
        HeldCopier.may_end.set()
        engine.rests()
        wait_until(lambda: messenger.is_up)


def test_a_lease_of_an_earlier_keeper_is_not_loaded(keeper):
    with PoolEngine(keeper.address) as one, PoolEngine(keeper.address) as other:
        one.stores("abc")
        messenger, load = other.host.cache._messenger, other.host.cache.load

        def replaced(*arguments):
            """The next keeper comes between the answer and the load."""
            keeper.kill()
            keeper.start()
            wait_until(lambda: messenger.connection == 2 and messenger.is_up)
            return load(*arguments)

        other.host.cache.load = replaced
        assert other.serves("abc") == 0
        assert other.host.statistics().cache.loads_failed == 1


def test_weights_that_change_while_a_keeper_comes_back_have_their_own_name(keeper):
    with PoolEngine(keeper.address) as one, PoolEngine(keeper.address) as other:
        one.stores("abc")
        messenger, greets = other.host.cache._messenger, other.host.cache._messenger._hello

        def changing(*arguments):
            answer = greets(*arguments)
            messenger.rename("other weights")
            return answer

        messenger._hello = changing
        keeper.kill()
        keeper.start()
        wait_until(lambda: messenger.is_up and messenger.connection > 1)
        assert finds_again(one, "abc") == 3
        assert other.serves("abc") == 0


def test_a_keeper_of_another_size_takes_back_the_region_as_it_is(keeper):
    with PoolEngine(keeper.address) as engine:
        engine.stores("abc")
        keeper.kill()
        keeper.host_bytes *= 2
        keeper.start()
        assert finds_again(engine, "abc") == 3
        assert "end all engines first" in keeper.log.read_text()


def test_an_engine_whose_socket_ends_is_not_gone_while_it_lives(keeper):
    """Its slots stay its own until the kernel frees its lock, or it comes back with nothing under way."""
    with PoolEngine(keeper.address, wrap_copier=HeldCopier) as engine, PoolEngine(keeper.address) as other:
        messenger = engine.host.cache._messenger
        under_way(engine, "abc")
        messenger.send(messenger.connection, Message(Kind.WELCOME))  # which no engine sends: it is left alone
        wait_until(lambda: not messenger.is_up)
        other.stores("abcdef")
        time.sleep(0.5)
        HeldCopier.may_end.set()
        engine.rests()
        wait_until(lambda: messenger.is_up)
        engine.forgets()
        assert other.serves("abcdef") == 0  # its chunks were being written all the time


def test_a_store_that_a_reset_overtakes_is_not_found(keeper):
    with PoolEngine(keeper.address, wrap_copier=HeldCopier) as engine, PoolEngine(keeper.address) as other:
        under_way(engine, "abc")
        engine.host.reset("2")
        HeldCopier.may_end.set()
        engine.rests()
        assert other.serves("abc") == 0
        assert engine.host.statistics().cache.store_cancelled == 3


def test_a_keeper_that_hangs_delays_a_request_and_nothing_else(keeper, monkeypatch):
    monkeypatch.setattr(questions, "ASK_SECONDS", 0.02)
    with PoolEngine(keeper.address) as one:
        one.stores("abc")
        keeper.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for number in range(8):
            assert one.serves(chr(600 + number)) == 0
        one.rests()
        assert one.is_whole
        assert time.monotonic() < began + 5
        keeper.process.send_signal(signal.SIGCONT)
        one.forgets()
        monkeypatch.setattr(questions, "ASK_SECONDS", PATIENCE / 2)
        assert finds_again(one, "abc") == 3


def test_close_does_not_wait_for_a_keeper_that_hangs(keeper):
    with PoolEngine(keeper.address) as engine:
        messenger = engine.host.cache._messenger
        keeper.process.send_signal(signal.SIGSTOP)
        for id in range(64):  # more than the system's buffers take
            messenger.send(messenger.connection, Message(Kind.RUN, id, (0,), (b"k" * 32,) * 1000))
        closing_it = threading.Thread(target=engine.host.close, daemon=True)
        closing_it.start()
        closing_it.join(PATIENCE)
        assert not closing_it.is_alive()


def test_a_keeper_of_another_user_that_comes_next_is_not_joined(keeper, monkeypatch, caplog):
    with PoolEngine(keeper.address) as engine:
        keeper.kill()
        monkeypatch.setattr("cpu_prefix_cache.node.hello.user_of", lambda _: 65534)
        keeper.start()
        wait_until(lambda: "another user" in caplog.text)
        assert engine.serves("abc") == 0


def test_a_new_keeper_hands_out_nothing_until_devices_of_engines_that_ended_are_quiet(tmp_path):
    with KeeperProcess(tmp_path, **{"settle-seconds": 4}) as keeper, PoolEngine(keeper.address) as engine:
        messenger = engine.host.cache._messenger
        keeper.kill()
        keeper.start()
        wait_until(lambda: messenger.is_up and messenger.connection == 2)
        came_back = time.monotonic()
        engine.stores("abc")
        assert engine.host.statistics().cache.chunks_stored == 0
        wait_until(lambda: finds_again(engine, "abc"))
        assert time.monotonic() > came_back + 3


def test_a_new_keeper_waits_no_longer_than_for_engines_that_live(tmp_path):
    with KeeperProcess(tmp_path) as keeper:
        dies = subprocess.Popen(
            [sys.executable, "-c", SERVING, keeper.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        )
        assert dies.stdout.readline() == b"served\n"
        with PoolEngine(keeper.address) as lives:
            assert lives.serves("abc") == 3
            lives.rests()
            lives.forgets()
            keeper.kill()
            dies.kill()
            dies.wait()
            keeper.start()
            assert finds_again(lives, "abc") == 3
            lives.stores("abcd")
            wait_until(lambda: finds_again(lives, "abcd") == 4)


SERVING = """
import sys
from tests.unit.keeper.pool_engine import PoolEngine
engine = PoolEngine(sys.argv[1])
engine.stores("abc")
print("served", flush=True)
sys.stdin.read()
"""


# What is refused


def options(keeper, pool=None, **changed):
    kv = torch.zeros(2, 2, 4, GRID, 3, dtype=torch.int16)
    groups = [Prefix(keys_and_values(kv, block_dim=2), block_tokens=GRID)]
    given = {
        "device": SmallEngine(4),
        "groups": groups,
        "pool": pool or NodePool(keeper.address, model="m", revision="1", connect_seconds=PATIENCE),
        "max_model_len": 100,
        "offload": "eager",
        **changed,
    }
    return with_options(**given)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"host_bytes": 1 << 20}, "host_bytes must be None"),
        ({"offload": "lazy"}, "offload must be 'eager'"),
        ({"policy": "arc"}, "policy must be 'lru'"),
        ({"store_after": 2}, "store_after must be 1"),
        ({"min_store_tokens": 8}, "min_store_tokens must be 0"),
        ({"checkpoint_interval": 4}, "checkpoint_interval must be None"),
        ({"min_load_tokens": None}, "must be a number"),
        ({"pool": "unix:/run/kv.sock"}, "NodePool"),
    ],
)
def test_an_option_that_the_keeper_decides_is_refused(keeper, changed, words):
    with pytest.raises(ConfigurationError, match=words):
        HostCache(**options(keeper, **changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"address": "/run/kv.sock"}, "unix:/"),
        ({"revision": None, "connect_seconds": -1}, "connect_seconds of a pool"),
        ({"model": ""}, "model of a pool is a text"),
        ({"hash": "xxh3_128"}, "sha256"),
    ],
)
def test_a_pool_that_cannot_be_meant_is_refused(changed, words):
    with pytest.raises(ConfigurationError, match=words):
        NodePool(**{"address": "unix:/run/kv.sock", "model": "m", "revision": "1", **changed})


def test_a_pool_without_an_identity_is_refused(keeper):
    with pytest.raises(ConfigurationError, match=r"a pool serves .* revision is missing"):
        HostCache(**options(keeper, pool=NodePool(keeper.address, model="m")))


def test_a_model_without_full_attention_is_refused(keeper):
    kv = torch.zeros(2, 2, 4, GRID, 3, dtype=torch.int16)
    window = Window(keys_and_values(kv, block_dim=2), block_tokens=GRID, window_tokens=8)
    planner = HybridChunkPlanner([window.group], max_model_len=100)
    device = PooledDevice(new_pool(planner, 4, on_device=True))
    with pytest.raises(ConfigurationError, match="with some full attention"):
        HostCache(**options(keeper, groups=[window], device=device))


def test_a_model_with_blocks_of_another_size_is_refused(keeper):
    with PoolEngine(keeper.address):
        kv = torch.zeros(2, 2, 4, GRID, 6, dtype=torch.int16)
        groups = [Prefix(keys_and_values(kv, block_dim=2), block_tokens=GRID)]
        with pytest.raises(ConfigurationError, match=f"blocks of {CHUNK_BYTES} bytes"):
            HostCache(**options(keeper, groups=groups))


@pytest.mark.parametrize("seconds", [0, 0.3])
def test_without_a_keeper_the_sentence_names_the_command(tmp_path, seconds):
    pool = NodePool(f"unix:{tmp_path / 'none'}", model="m", revision="1", connect_seconds=seconds)
    given = options(None, pool=pool)
    with pytest.raises(ConfigurationError, match="cpu-prefix-cache keep --socket"):
        HostCache(**given)


def test_keys_that_are_no_sha256_are_refused(keeper):
    with PoolEngine(keeper.address) as engine, pytest.raises(MisuseError, match="32 bytes"):
        engine.host.start("a", [b"k" * 16], num_tokens=5, on_device=0, allocate=lambda *_: None)


@pytest.mark.parametrize("odd", [b"k" * 40, keys_of("a")[0]])
def test_a_key_in_the_middle_that_cannot_be_is_refused_without_strict(keeper, odd):
    keys = keys_of("abcd")
    with closing(HostCache(**options(keeper))) as host, pytest.raises(MisuseError, match=r"keys are|same key"):
        host.start("a", [*keys[:2], odd, keys[3]], num_tokens=17, on_device=0, allocate=lambda *_: None)


def test_a_load_that_is_refused_keeps_its_lease_until_the_request_ends(keeper):
    with PoolEngine(keeper.address) as one, PoolEngine(keeper.address) as other:
        one.stores("abc")
        cache, load = other.host.cache, other.host.cache.load

        def odd_before(id, boundary, destinations, now):
            with pytest.raises(MisuseError, match="rule 6"):
                load(id, boundary + 1, destinations, now)
            return load(id, boundary, destinations, now)

        cache.load = odd_before
        assert other.serves("abc") == 3


def test_a_second_keeper_at_one_socket_is_refused(keeper):
    command = [sys.executable, "-m", "cpu_prefix_cache.tools.cli", "keep", "--host-bytes=1MiB"]
    second = subprocess.run(
        [*command, f"--socket={keeper.path}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert second.returncode == 2 and "another keeper serves" in second.stderr


def test_a_process_of_another_user_is_refused(keeper, monkeypatch):
    monkeypatch.setattr("cpu_prefix_cache.node.hello.user_of", lambda _: 65534)
    with pytest.raises(ConfigurationError, match="another user"):
        PoolEngine(keeper.address)


def test_the_socket_is_for_its_user_alone(keeper):
    assert os.stat(keeper.path).st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        encoded(Message(Kind.RUN, 1, (0,), (b"k" * 32,))),
        HELLO + encoded(Message(Kind.RUN, 1, (), (b"k" * 32,))),
        encoded(Message(Kind.WELCOME)),
        HELLO + encoded(Message(Kind.TAKE, 1, (0,), (b"k",))),
        HELLO + encoded(Message(Kind.COMMIT, 9, (3, 0))),
        HEADER.pack(HEADER.size, VERSION, Kind.RUN, 0, 1, 0, 1),  # a key without bytes
        encoded(Message(Kind.HELLO, 0, (CHUNK_BYTES,), (b"n" * 16,))),  # no number of an engine
        hello(block_bytes=0),
        hello(shape=SHAPE[:-1]),
        hello(shape=()),
        hello(shape=(0, *SHAPE[1:])),
        hello(shape=(*SHAPE[:2], 9, *SHAPE[3:])),
        hello(shape=(*SHAPE[:-1], 1 << 60)),
        hello(shape=(4, 1) + (0, 4, 24, 1, 0, 0, 0) * 65),
        hello(shape=(4, 1, 3, 4, 24, 1, 0, 0, 0)),  # a state alone
        hello(shape=(1 << 40, 1, 0, 1 << 40, 24, 1, 0, 0, 0, 1, 1, 24, 1, 0, 1 << 40, 0)),  # a window of many blocks
        hello(shape=(1 << 17, 1, 0, 1 << 17, 24, 1, 0, 0, 0, 1, 1, 24, 1, 0, 4, 0)),  # more blocks than records number
        hello(shape=(4, 1, 0, 4, 1 << 40, 1, 0, 0, 0, 3, 4, 1, 1, 0, 0, 0)),  # a piece that could be divided for ever
        hello(shape=(4, 1 << 34, 0, 4, 1 << 34, 1, 0, 0, 0, 3, 4, 1 << 34, 1, 1, 0, 0)),  # the same, in narrow lanes
    ],
)
def test_a_keeper_survives_whatever_is_sent(keeper, sent):
    with PoolEngine(keeper.address) as engine:
        engine.stores("abc")
        with socket.socket(socket.AF_UNIX) as odd:
            odd.settimeout(5)
            odd.connect(keeper.path)
            odd.sendall(sent)
            while odd.recv(1 << 16):
                pass  # until it is left alone
        assert engine.serves("abc") == 3


few = st.integers(0, 2)


@given(st.sampled_from(Kind), few, few, few, st.sampled_from([0, 0, 1, 8]), st.binary(max_size=60))
def test_bytes_that_are_no_message_are_a_protocol_error(kind, width, numbers, keys, more, rest):
    received = Received()
    length = HEADER.size + 8 * numbers + width * keys + more
    received.feed(HEADER.pack(length, VERSION, kind, width, 1, numbers, keys) + rest)
    try:
        messages = list(received)
    except ProtocolError:
        return
    assert not more and len(messages) <= 1


@pytest.mark.parametrize(("width", "is_right"), [(KEY_BYTES, True), (KEY_BYTES - 1, False), (1, False)])
def test_a_header_of_many_short_keys_is_a_protocol_error_before_they_are_there(width, is_right):
    """30 million keys of two bytes took 1.7 GB and nine seconds until the kind of message was looked at."""
    received, keys = Received(), 1 << 20
    received.feed(HEADER.pack(HEADER.size + width * keys, VERSION, Kind.RUN, width, 1, 0, keys))
    with nullcontext() if is_right else pytest.raises(ProtocolError, match="that is none"):
        assert not list(received)


@pytest.fixture
def served(tmp_path):
    """A keeper in this process, which makes steps when it is to, and a connection to it."""
    server = Server(str(tmp_path / "kv.sock"), 32 * CHUNK_BYTES, adopt_seconds=0, settle_seconds=0)
    with closing(server), socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(PATIENCE)
        connected.connect(str(tmp_path / "kv.sock"))
        server.step()
        yield server, connected


def test_where_no_region_can_be_made_the_engine_alone_hears_of_it(served, monkeypatch):
    server, connected = served
    monkeypatch.setattr(regions, "make", Mock(side_effect=OSError("no memory")))
    connected.sendall(HELLO)
    server.step()
    assert b"no memory" in connected.recv(1 << 16)


def test_an_engine_of_another_release_is_refused_with_a_sentence_that_it_understands(served):
    server, connected = served
    for version in (VERSION - 1, VERSION + 1):
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(connected.getpeername())
            other.sendall(hello(version=version))
            server.step()
            server.step()
            answer = other.recv(1 << 16)
            assert HEADER.unpack_from(answer)[1:3] == (version, Kind.REFUSED) and b"of one release" in answer
            assert not other.recv(1), "it is left alone"


def asks_for_ever(server, connected):
    for number in range(100_000):
        connected.sendall(encoded(Message(Kind.COUNT, number)))
        server.step()


def test_an_engine_that_reads_no_answers_is_left_alone(served, tmp_path, monkeypatch):
    """Answers that the kernel does not take wait for it, up to a bound."""
    server, connected = served
    monkeypatch.setattr(servers, "MOST_UNSENT", 1 << 16)
    connected.sendall(HELLO)
    server.step()
    with pytest.raises(ConnectionError):
        asks_for_ever(server, connected)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(tmp_path / "kv.sock"))
        other.sendall(HELLO)
        server.step()
        server.step()
        other.settimeout(PATIENCE)
        assert other.recv(1 << 16), "others are answered"


def test_an_engine_names_another_release_where_a_keeper_hangs_up(tmp_path):
    """A keeper of 0.2.0 ends the connection without an answer."""
    with closing(socket.socket(socket.AF_UNIX)) as old:
        old.bind(str(tmp_path / "kv.sock"))
        old.listen()

        def hang_up():
            with contextlib.suppress(OSError):
                while True:
                    with old.accept()[0] as one:
                        one.recv(1 << 16)

        threading.Thread(target=hang_up, daemon=True).start()
        pool = NodePool(f"unix:{tmp_path / 'kv.sock'}", model="m", revision="1", connect_seconds=0.3)
        with pytest.raises(ConfigurationError, match="another release"):
            HostCache(**options(None, pool=pool))
        old.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_sends_files_and_files_ends(served):
    server, connected = served
    for at in range(2):
        socket.send_fds(connected, [HELLO[at : at + 1]], [0, 0])
        server.step()
    assert not connected.recv(1 << 16)


def test_a_keeper_without_files_to_spare_waits_and_accepts_again(served, monkeypatch):
    server, connected = served
    connected.sendall(HELLO)
    server.step()
    ((file, (listener, begin)),) = server._listeners.items()
    accept = Mock(side_effect=OSError("too many open files"))
    monkeypatch.setitem(server._listeners, file, (Mock(wraps=listener, accept=accept), begin))
    with socket.socket(socket.AF_UNIX) as late:
        late.settimeout(PATIENCE)
        late.connect(connected.getpeername())
        late.sendall(HELLO)
        for _ in range(5):
            server.step()
        assert accept.call_count == 1
        accept.side_effect = listener.accept
        wait_until(lambda: server.step() or len(server._joined) == 2)


def test_a_number_without_the_files_of_the_region_is_refused(served):
    """Else whoever names a number takes the place of an engine that lives, and its leases end."""
    server, connected = served
    connected.sendall(HELLO)
    server.step()
    connected.recv(1 << 16)
    with socket.socket(socket.AF_UNIX) as thief:
        thief.connect(connected.getpeername())
        thief.sendall(hello(number=1))
        server.step()
        server.step()
        assert b"another region" in thief.recv(1 << 16)
    connected.sendall(encoded(Message(Kind.RUN, 1, (0,), (b"k" * 32,))))
    server.step()
    assert connected.recv(1 << 16) == encoded(Message(Kind.RAN, 1, (0, 0)))


def test_an_engine_that_reads_its_answers_late_gets_all_of_them(served, monkeypatch):
    """More than its socket holds: the rest waits in the keeper."""
    monkeypatch.setattr(Server, "_milliseconds", 10)  # to wait for what comes next
    server, connected = served
    connected.sendall(HELLO)
    server.step()
    connected.recv(1 << 16)
    asked, answered, received = range(2_000), [], Received()
    for id in asked:
        connected.sendall(encoded(Message(Kind.RUN, id, (0,), (b"k" * 32,))))
        server.step()
    connected.settimeout(0)

    def has_all():
        server.step()
        with contextlib.suppress(BlockingIOError):
            received.feed(connected.recv(1 << 16))
        answered.extend(message.id for message in received)
        return len(answered) == len(asked)

    wait_until(has_all)
    assert answered == [*asked]


def test_the_keeper_imports_neither_torch_nor_a_gpu(keeper):
    maps = Path(f"/proc/{keeper.process.pid}/maps").read_text()
    assert "python" in maps
    assert not [name for name in ("torch", "numpy", "triton", "cuda") if name in maps]
    program = "import sys, cpu_prefix_cache.tools.cli, cpu_prefix_cache.node.server; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
    )
    assert found.stdout.strip() == "False"


def test_both_ends_ask_the_kernel_who_is_there():
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert shared_file.user_of(one) == os.geteuid()


def test_no_thread_is_left_behind(keeper):
    before = threading.active_count()
    with PoolEngine(keeper.address):
        assert threading.active_count() > before
    assert threading.active_count() == before


def broken(copier, tensors):
    raise RuntimeError("a copier of the user")


def test_a_host_cache_that_cannot_be_built_leaves_the_keeper(keeper):
    gc.collect()
    before, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="of the user") as raised:
            PoolEngine(keeper.address, wrap_copier=broken)
        assert threading.active_count() == before and raised.tb  # whose frames have the cache
        del raised
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files


ENDING = """
import sys
from cpu_prefix_cache.node.seat import Seat
from tests.unit.keeper import test_node_pool as tests

class Waited(tests.Held):
    def until_passed(self):
        print("waits for its copies", flush=True)
        tests.HeldCopier.may_end.set()

leave = Seat.leave
Seat.leave = lambda seat: (print("leaves", flush=True), leave(seat))
tests.Held = Waited
tests.questions.ASK_SECONDS = tests.PATIENCE / 2
engine = tests.PoolEngine(sys.argv[1], wrap_copier=tests.HeldCopier)
engine.serves("abc")
tests.wait_until(lambda: engine.steps() or engine.host.statistics().cache.storing)
"""


def test_an_engine_that_ends_without_close_leaves_the_keeper_after_its_copies(keeper):
    """Another one gets the slots that they write as soon as it has left."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDING, keeper.address],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        check=True,
    )
    assert ended.stdout.split("\n") == ["waits for its copies", "leaves", ""]


def test_a_host_cache_that_is_dropped_leaves_the_keeper(keeper):
    before = threading.active_count()
    engine = PoolEngine(keeper.address)
    assert threading.active_count() > before
    del engine
    gc.collect()
    wait_until(lambda: threading.active_count() == before)
