"""Checkpoints, story by story (rule 9). Any order of events is held by test_hybrid_cache_machine.py.

A prompt is letters, one to a chunk of four tokens; "abc!" is the checkpoint at the end of "abc".
"""

from dataclasses import replace

import pytest

from cpu_prefix_cache import POLICIES, ConfigurationError, Hit, Miss, MisuseError
from cpu_prefix_cache.deciding import (
    BlockPool,
    ChunkLocalGroup,
    HybridChunkPlanner,
    PooledDevice,
    PoolExhausted,
    PrefixGroup,
    Request,
    StateGroup,
    WindowGroup,
)
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.stores import Stop
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from cpu_prefix_cache.testing import Engine as SimulatedEngine
from property_tests.strategies import chain

GRID = 4
FULL = PrefixGroup(name="full", block_tokens=GRID, block_bytes=100)
STATE = StateGroup(name="state", block_tokens=GRID, block_bytes=100)
WINDOW = WindowGroup(name="window", block_tokens=GRID, block_bytes=100, window_tokens=2 * GRID + 1)
SHORT = WindowGroup(name="window", block_tokens=GRID, block_bytes=100, window_tokens=GRID + 1)


class Engine(SimulatedEngine):
    """Requests take nothing from the device or the host, and leave on the device what they compute."""

    def __init__(self, *groups, mode="eager", host=64, device=64, **options):
        planner = HybridChunkPlanner(groups, max_model_len=1_000)
        super().__init__(mode, device, host, planner=planner, **options)

    def starts(self, prompt, extra=1):
        """The chunks after which the cache wants checkpoints."""
        request = self.requests[prompt] = Request(prompt, chain(prompt), len(prompt) * GRID + extra)
        self.cache.admit(request, 0, now=0.0)
        return self.wants(prompt)

    def fills(self, prompt, chunks):
        for end in range(1, chunks + 1):
            self.device_has(prompt[:end])

    def ends(self, prompt, chunks=None):
        self.cache.finished(prompt, (len(prompt) if chunks is None else chunks) * GRID)

    def rests(self):
        """Steps until nothing moves any more; everything ends well."""
        while self.copies():
            pass

    def serves(self, prompt, keep=None):
        self.starts(prompt)
        self.rests()
        self.computes(prompt, keep=keep)
        self.rests()
        self.ends(prompt)
        self.rests()

    def room_for_a_state(self):
        """A node on the device that shares its one piece with nobody, and the blocks of that."""
        node, (blocks,) = self.device.stage("own", [1])
        return node, blocks

    def device_forgets(self):
        self.gpu.reset()


# where checkpoints are kept


def test_the_last_boundary_of_a_prompt_is_kept_and_hit():
    """A prompt on a boundary gives up its last chunk: the checkpoint is where a repeat of it can land."""
    engine = Engine(FULL, STATE)
    assert engine.starts("abc", extra=1) == [3]
    assert engine.starts("xyz", extra=0) == [2]
    engine.computes("abc")
    engine.rests()
    assert engine.checkpoints == {"abc!"}
    assert engine.asks("abcd") == Hit(3 * GRID)
    assert engine.asks("abc", extra=0) == Miss()  # at 2 chunks there is no state, and 3 would leave nothing to compute


def test_the_last_boundary_of_a_finished_request_is_kept():
    engine = Engine(FULL, STATE)
    engine.starts("ab")
    engine.computes("ab")
    engine.requests["ab"].keys.extend(chain("abcd")[2:])  # it decodes
    engine.device_has("abc")
    engine.device_has("abcd", checkpoint=True)
    engine.cache.finished("ab", 4 * GRID)
    engine.rests()
    assert engine.checkpoints == {"ab!", "abcd!"}


def test_nothing_is_kept_where_the_device_kept_nothing():
    engine = Engine(FULL, STATE)
    engine.starts("abc")
    engine.computes("abc", keep=[])
    engine.ends("abc")
    engine.rests()
    assert engine.checkpoints == set() and engine.asks("abcd") == Miss()


def test_a_second_continuation_is_worth_a_checkpoint_where_it_begins():
    engine = Engine(FULL, STATE)
    engine.serves("abcd")
    assert engine.starts("abxy") == [2, 4]
    engine.computes("abxy")
    engine.rests()
    assert engine.checkpoints == {"abcd!", "ab!", "abxy!"}
    assert engine.asks("abzz") == Hit(2 * GRID)


def test_a_branch_is_seen_on_the_device_as_well():
    engine = Engine(FULL, STATE, mode="lazy")
    engine.starts("abcd")
    engine.computes("abcd")
    assert engine.host == set()
    assert engine.starts("abcx") == [3, 4]


def test_checkpoints_at_intervals_are_kept_if_configured():
    assert Engine(FULL, STATE, checkpoint_interval=2 * GRID).starts("abcdefg") == [2, 4, 6, 7]
    assert Engine(FULL, STATE).starts("abcdefg") == [7]
    with pytest.raises(ConfigurationError, match="multiple of the grid's 4 tokens, got 6"):
        Engine(FULL, STATE, checkpoint_interval=6)


@pytest.mark.parametrize(("ahead", "nodes"), [(0, {"abcd!"}), (1, {"abc", "abcd!"})])
def test_a_load_pins_its_last_chunk_apart_only_where_the_checkpoint_does_not_hang_below_it(ahead, nodes):
    """The pool's lower bound of available blocks counts nodes under two pins twice."""
    engine = Engine(replace(FULL, lookahead_tokens=ahead), STATE)
    engine.serves("abcd", keep=[4])
    coordinator = engine.cache.coordinator
    pinned = coordinator.resume_nodes(chain("abcd"), 4 - ahead)
    assert {coordinator.pool.key(node).decode().replace("\x02", "!") for node in pinned} == nodes


def test_a_model_of_prefix_groups_only_needs_none():
    engine = Engine(FULL)
    assert engine.starts("abc") == []
    engine.computes("abc")
    engine.rests()
    assert engine.host == {"a", "ab", "abc"} and engine.asks("abcd") == Hit(3 * GRID)


def test_a_boundary_where_a_local_chunk_begins_needs_none():
    local = ChunkLocalGroup(name="local", block_tokens=GRID, block_bytes=100, window_tokens=2 * GRID)
    engine = Engine(FULL, local)
    assert engine.starts("abcd") == []
    assert engine.starts("vwxyz") == [5]
    engine.computes("abcd")
    engine.rests()
    assert engine.asks("abcd") == Hit(4 * GRID) and engine.asks("abc") == Hit(2 * GRID)


# shared pieces


def test_two_conversations_share_the_window_blocks_they_both_see():
    """Each sees two chunks back: "abcd" the windows of c and d, "abcde" those of d and e."""
    engine = Engine(FULL, WINDOW)
    engine.serves("abcd")
    assert engine.cache.statistics().pool.cached == 4 + 2
    engine.serves("abcde")
    assert engine.cache.statistics().pool.cached == 5 + 3  # e, and the window block of e
    assert engine.cache.statistics().bytes_stored == 800
    engine.serves("abcx")
    assert engine.cache.statistics().pool.cached == 6 + 5  # at abc: b, c; at abcx: c, x; c was there
    assert engine.checkpoints == {"abcd!", "abcde!", "abc!", "abcx!"}


def test_a_shared_block_stays_until_the_last_checkpoint_that_sees_it_goes():
    engine = Engine(FULL, WINDOW)
    engine.serves("abcd")
    engine.serves("abcde")
    pool = engine.cache.pool
    first, second = (pool.checkpoints.pieces(pool.find(checkpoint_key(key))) for key in (b"abcd", b"abcde"))
    shared = set(first) & set(second)
    assert len(shared) == 1
    pool.withdraw(pool.find(checkpoint_key(b"abcd")))
    assert pool.statistics().free == 64 - 5 - 2 and engine.asks("abcde") == Hit(5 * GRID)
    pool.withdraw(pool.find(checkpoint_key(b"abcde")))
    assert pool.statistics().free == 64 - 5


def two_in_flight(**options):
    """Checkpoints at "abc" and "abcd", both on their way: the second builds on a piece the first still writes."""
    engine = Engine(FULL, WINDOW, checkpoint_interval=GRID, **options)
    engine.starts("abcd")
    engine.computes("abcd", 3, keep=[])
    engine.rests()
    engine.device_has("abc", checkpoint=True)
    engine.cache.preempted("abcd")  # what it has on the device is stored at once
    first = engine.steps().transfers
    engine.starts("abcd")
    engine.computes("abcd", keep=[4])
    return engine, first, engine.steps().transfers


def test_a_checkpoint_waits_for_the_pieces_another_writes():
    engine, first, rest = two_in_flight()
    engine.reports(rest)
    assert engine.checkpoints == set(), "it was found before its piece was there"
    engine.reports(first)
    engine.rests()
    assert engine.checkpoints == {"abc!", "abcd!"}


def test_a_checkpoint_that_builds_on_a_torn_piece_fails_with_it():
    engine, first, rest = two_in_flight()
    engine.reports(failed=first)
    engine.reports(rest)
    assert engine.checkpoints == set()
    engine.rests()
    engine.ends("abcd")
    engine.rests()
    assert "abcd!" in engine.checkpoints  # stored again, with a piece of its own
    assert engine.cache.statistics().pool.writing == engine.cache.statistics().pool.retired == 0


def test_complete_or_absent_when_a_rank_fails():
    engine = Engine(FULL, WINDOW, STATE, ranks=2)
    engine.starts("abc")
    engine.computes("abc")
    transfers = engine.steps().transfers
    engine.reports(transfers)
    assert engine.host == set(), "one rank is not enough (rule 10)"
    engine.reports(failed=transfers, rank=1)
    assert engine.host == set() and engine.asks("abcd") == Miss()
    assert engine.cache.statistics().pool.free == 64


def test_the_pool_shares_nothing_whose_writer_gave_up():
    """Even while somebody still holds on to it."""
    pool = BlockPool(16, needs_checkpoint=lambda depth: True)
    a, b = PieceNeed("a", 1), PieceNeed("b", 1)
    [writer], [follower] = pool.allocate(0, needs=[a]), pool.allocate(0, needs=[a, b])
    [torn], both = pool.checkpoints.to_write(writer), pool.checkpoints
    assert both.to_write(follower)[0] is None and both.pieces(follower)[0] == torn
    pool.retire([writer])
    [third] = pool.allocate(0, needs=[a])
    assert pool.checkpoints.to_write(third)[0] not in (None, torn), "a torn piece is shared"
    pool.abort([follower, writer, third])
    assert pool.statistics().free == 16


# reset


def test_a_reset_in_flight_shares_nothing_old():
    """The same tokens are stored again while the old copy still moves (rule 13)."""
    engine = Engine(FULL, WINDOW)
    engine.starts("abc")
    engine.computes("abc")
    old = engine.steps().transfers
    engine.cache.reset()
    engine.device_forgets()
    assert engine.host == set()
    engine.ends("abc")
    engine.starts("abc")
    engine.computes("abc")
    new = engine.steps().transfers
    host_blocks = [{b for t in each for copy in t.copies for b in copy.host_blocks} for each in (old, new)]
    assert len(host_blocks[1]) == 5 and host_blocks[0].isdisjoint(host_blocks[1]), "an old block is written by both"
    engine.reports(new)
    assert engine.checkpoints == {"abc!"}
    engine.reports(old)
    assert engine.checkpoints == {"abc!"} and engine.cache.statistics().pool.free == 64 - 5


# room


def computing_xyz():
    """An engine whose host has "abc", and no room for more than the three chunks of a request that runs."""
    engine = Engine(FULL, STATE, host=8)
    engine.serves("abc")
    engine.starts("xyz")
    engine.computes("xyz", keep=[])
    return engine


def test_chunks_that_led_to_no_checkpoint_go_first():
    engine = computing_xyz()
    engine.rests()
    assert engine.host >= {"abc!", "x", "xy", "xyz"}
    engine.ends("xyz")
    engine.rests()
    engine.serves("mn")  # takes 3; 1 is free
    assert engine.host == {"a", "ab", "abc", "abc!", "x", "m", "mn", "mn!"}


def test_chunks_that_need_no_checkpoint_are_of_use_without_one():
    local = ChunkLocalGroup(name="local", block_tokens=GRID, block_bytes=100, window_tokens=2 * GRID)
    engine = Engine(FULL, local, host=5)
    for prompt in ("xy", "ab", "mn"):
        engine.serves(prompt)
    assert engine.host == {"x", "a", "ab", "m", "mn"}  # who was used longest ago has left


def test_chunks_of_a_running_request_are_not_useless_yet():
    engine = computing_xyz()
    engine.rests()
    engine.serves("mn")
    assert {"x", "xy", "xyz", "mn!"} <= engine.host and "abc!" not in engine.host


def test_a_checkpoint_that_does_not_fit_is_not_stored_and_takes_nothing():
    engine = Engine(FULL, WINDOW, mode="lazy", host=4, device=6, max_tokens=100)
    engine.starts("abcd")
    engine.computes("abcd")
    engine.ends("abcd")
    engine.rests()
    assert engine.host == set() and engine.cache.statistics().pool.free == 4
    assert engine.cache.statistics().store_refusals > 0


def test_chunks_are_not_stored_with_a_checkpoint_that_has_left_the_device():
    """It was there when the store was thought of. Its room on the host would never be written, nor given back."""
    engine = Engine(FULL, STATE, host=8)
    engine.fills("ab", 2)
    stores, pool = engine.cache.edge.stores, engine.cache.pool
    checkpoint = engine.cache.coordinator.checkpoint_at(chain("ab"), 2)
    transfer, stop = stores.plan(Chain(None, chain("ab"), checkpoint), pool.touch(None))
    assert transfer is None and stop is Stop.NOT_ON_DEVICE and pool.statistics().free == 8


def test_a_checkpoint_goes_alone_and_its_chunk_after_it():
    engine = Engine(FULL, STATE)
    engine.serves("ab")
    pool = engine.cache.pool
    order = [pool.key(node).decode().replace("\x02", "!") for node in pool.soonest_evicted()]
    assert order == ["ab!", "ab", "a"]


def test_chunks_without_bytes():
    """In a model of states only, a conversation takes one host block, however long it is."""
    engine = Engine(STATE)
    assert engine.planner.host_blocks_per_chunk == 0
    engine.serves("abcdef")
    assert engine.host == {"a", "ab", "abc", "abcd", "abcde", "abcdef", "abcdef!"}
    assert engine.cache.statistics().pool.cached == 1 and engine.asks("abcdefg") == Hit(6 * GRID)
    engine.cache.pool.reset()
    assert engine.asks("abcdefg") == Miss() and engine.cache.statistics().pool.free == 64


# loads


def test_a_load_copies_of_a_window_only_what_the_engine_has_not():
    """Rule 8. At 4 chunks the window sees c and d; from n0 = 3 chunks on only d is copied."""
    engine = Engine(FULL, WINDOW)
    engine.serves("abcd")
    engine.device_forgets()
    for n0, windows in ((3, 1), (2, 2), (0, 2)):
        request = Request(f"from {n0}", chain("abcde"), 5 * GRID + 1)
        assert engine.cache.lookup(request, n0 * GRID, 100.0 * (4 - n0)) == Hit(4 * GRID, n0 * GRID)
        engine.cache.admit(request, n0 * GRID, 4 * GRID)
        chunks = engine.gpu.allocate(4 - n0)
        [pieces] = engine.gpu.allocate(0, needs=[PieceNeed((n0, at), 1) for at in range(windows)])
        destinations = [block for (block,) in engine.gpu.checkpoints.pieces(pieces)]
        engine.cache.load(request.id, 4 * GRID, [chunks, destinations], 100.0 * (4 - n0))
        (plan,) = engine.steps().transfers
        full, window = plan.copies
        assert (len(full.host_blocks), len(window.host_blocks)) == (4 - n0, windows)
        assert window.device_blocks == tuple(destinations)
        node = engine.cache.pool.find(checkpoint_key(b"abcd"))
        assert window.host_blocks == tuple(b for (b,) in engine.cache.pool.checkpoints.pieces(node)[-windows:])
        engine.reports([plan])


def test_a_load_that_fails_takes_its_checkpoint_away():
    engine = Engine(FULL, STATE)
    engine.serves("abc")
    engine.device_forgets()
    engine.cache.admit(Request("r", chain("abcd"), 4 * GRID + 1), 0, 3 * GRID)
    _, state = engine.room_for_a_state()
    engine.cache.load("r", 3 * GRID, [engine.gpu.allocate(3), state], 0.0)
    engine.reports(failed=engine.steps().transfers)
    assert engine.host == set() and engine.cache.statistics().pool.free == 64


# blocks that the two halves could have had together


def test_a_checkpoint_on_the_device_over_chunks_on_the_host_only_is_counted():
    engine = Engine(FULL, STATE)
    engine.starts("abc")
    engine.computes("abc", keep=[])
    engine.rests()
    engine.device_has("abc", checkpoint=True)
    assert engine.asks("abcd") == Miss()
    engine.starts("abcd", extra=0)
    assert engine.cache.statistics().union_misses == 1
    engine.serves("xyz")
    engine.starts("xyzz", extra=0)
    assert engine.cache.statistics().union_misses == 1  # all of it is here: the engine did not take it


def test_nothing_is_counted_where_the_chunks_are_not_here():
    engine = Engine(FULL, STATE, mode="lazy")
    engine.starts("abc")
    engine.computes("abc")
    engine.starts("abcd", extra=0)
    assert engine.cache.statistics().union_misses == 0


# lazy


def lazy(**options):
    return Engine(FULL, STATE, **{"mode": "lazy", "device": 16, "max_tokens": 8 * GRID, **options})


def test_lazy_stores_a_chain_with_its_checkpoint_and_no_chunk_for_itself():
    engine = lazy(device=6)
    engine.starts("abc")
    engine.computes("abc", keep=[])
    for waiting in range(3):
        engine.gpu.allocate(waiting)  # nothing is free any more: the chunks are the next to go
        engine.rests()
    assert engine.host == set()
    engine = lazy(device=8)
    engine.starts("abcx")
    engine.computes("abcx", keep=[4])
    engine.rests()
    assert engine.host == {"a", "ab", "abc", "abcx", "abcx!"}


def test_pieces_that_are_there_need_no_room():
    """Two blocks are free, and the checkpoint lacks one: what it shares is being written, and held."""
    pool = BlockPool(6, needs_checkpoint=lambda depth: True)
    a, b, c = (PieceNeed(name, 1) for name in "abc")
    pool.allocate(2)
    pool.allocate(0, needs=[a, b])
    assert pool.take(2, needs=[a, b, c]) == []
    *_, node = pool.allocate(1, needs=[a, b, c])
    assert pool.checkpoints.to_write(node)[:2] == [None, None]


def test_a_load_in_flight_keeps_its_checkpoint():
    """Not only the chunks: the pin is on the checkpoint, under which they stand."""
    engine = Engine(FULL, STATE, host=4)
    engine.serves("abc")
    engine.device_forgets()
    engine.cache.admit(Request("r", chain("abcd"), 3 * GRID + 1), 0, 3 * GRID)
    _, state = engine.room_for_a_state()
    engine.cache.load("r", 3 * GRID, [engine.gpu.allocate(3), state], 0.0)
    (load,) = engine.steps().transfers
    engine.serves("x")
    assert engine.host == {"a", "ab", "abc", "abc!"}
    engine.reports([load])
    engine.serves("x")
    assert {"x", "x!"} <= engine.host


def test_the_destinations_of_a_checkpoint_are_checked():
    """Rule 7: as many as lie in what is loaded, and none twice."""
    engine = Engine(FULL, WINDOW)
    engine.serves("abc")
    engine.device_forgets()
    engine.cache.admit(Request("r", chain("abcd"), 3 * GRID + 1), GRID, 3 * GRID)
    for windows in ([7], [7, 7], [7, 8, 9]):
        with pytest.raises(MisuseError, match="destination"):
            engine.cache.load("r", 3 * GRID, [[5, 6], windows], 0.0)
    assert engine.cache.statistics().pool.pinned == 0


def test_lazy_remembers_a_checkpoint_that_was_loaded():
    """The host may evict its copy before the device does: then it is stored again, as its chunks are."""
    engine = lazy(device=6)
    engine.serves("abc")
    assert "abc!" in engine.host
    engine.device_forgets()
    engine.serves("xy")  # what was remembered of the device is swept
    engine.serves("vw")
    engine.device_forgets()
    engine.cache.admit(Request("r", chain("abcd"), 3 * GRID + 1), 0, 3 * GRID)
    chunks, (node, state) = engine.gpu.allocate(3), engine.room_for_a_state()
    engine.cache.load("r", 3 * GRID, [chunks, state], 0.0)
    engine.rests()
    engine.gpu.abort([*chunks, node])
    for name in chain("abcd"):
        engine.device_has(name.decode(), checkpoint=name == b"abc")
    engine.cache.computed("r", 4 * GRID)
    engine.cache.pool.withdraw(engine.cache.pool.find(b"a"))
    engine.cache.finished("r", 4 * GRID)
    engine.rests()
    assert engine.host >= {"a", "ab", "abc", "abc!"}


def test_lazy_looks_past_chunks_without_bytes():
    """They are handed out with nothing: the next to leave is the checkpoint behind them."""
    engine = Engine(STATE, mode="lazy", device=8, max_tokens=GRID)
    engine.starts("ab")
    engine.computes("ab")
    engine.ends("ab")
    for name in ("opqrst", "uvwxyz"):
        engine.starts(name)
        engine.computes(name, keep=[])
        engine.ends(name)
        for end in range(1, 7):
            engine.gpu.resume_points.may_be_useless(engine.gpu.find(name[:end].encode()))
    filler = engine.gpu.allocate(0, needs=[PieceNeed("in use", 7)])
    engine.rests()
    assert "ab!" in engine.host
    engine.gpu.abort(filler)


def test_eager_stores_no_chunk_of_an_ended_request_that_leads_to_no_checkpoint():
    """Rule 9: not stored any more."""
    engine = Engine(FULL, STATE)
    engine.starts("abcd")
    engine.computes("abcd", keep=[2])
    engine.requests["abcd"].keys.extend([b"abcde"])
    engine.device_has("ab", checkpoint=True)
    engine.rests()
    engine.device_has("abcde")
    engine.ends("abcd", 5)
    engine.rests()
    assert "abcde" not in engine.host


def test_a_request_that_never_comes_back_leaves_chunks_of_no_use():
    """Preempted, and aborted before it was admitted again."""
    engine = computing_xyz()
    engine.rests()
    engine.cache.preempted("xyz")
    engine.rests()
    engine.ends("xyz")
    engine.serves("mn")
    assert {"abc!", "mn!"} <= engine.host


def test_chunks_that_land_after_their_request_has_ended_are_of_no_use_at_once():
    engine = computing_xyz()
    late = engine.steps().transfers
    engine.ends("xyz")
    engine.reports(late)
    engine.serves("mn")
    assert {"abc!", "mn!", "x"} <= engine.host and "xyz" not in engine.host


def below_a_load():
    """ "abcd" is stored below "abc", which another request loads meanwhile, and that load fails."""
    engine = Engine(FULL, STATE)
    engine.serves("abc")
    engine.starts("abcd")
    engine.computes("abcd")
    stores = engine.steps().transfers
    engine.cache.admit(Request("r", chain("abcx"), 4 * GRID), 0, 3 * GRID)
    _, state = engine.room_for_a_state()
    engine.cache.load("r", 3 * GRID, [engine.gpu.allocate(3), state], 0.0)
    (load,) = engine.steps().transfers
    engine.reports(failed=[load])
    return engine, stores


def test_a_store_below_what_was_withdrawn_registers_nothing():
    """It is in nobody's way either: the same chunks are stored again at once."""
    engine, stores = below_a_load()
    engine.device_has("abcd")
    engine.cache.computed("abcd", 4 * GRID)
    engine.ends("abcd")
    again = engine.steps().transfers
    assert again
    engine.reports(again)
    engine.rests()
    assert engine.host >= {"a", "ab", "abc", "abcd", "abcd!"}
    engine.reports(stores)
    now = engine.cache.statistics().pool
    assert now.writing == now.retired == now.pinned == 0


def test_a_store_whose_parent_has_landed_holds_it():
    """Its parent is a chunk without a checkpoint, of a request that has ended: it would be the first to go."""
    engine = Engine(FULL, STATE, host=4)
    engine.starts("abc")
    engine.computes("abc", 2, keep=[])
    (first,) = engine.steps().transfers
    engine.computes("abc")
    rest = engine.steps().transfers
    engine.ends("abc")
    engine.reports([first])
    engine.serves("x")
    assert {"a", "ab"} <= engine.host
    engine.reports(rest)
    engine.rests()
    assert {"abc!"} <= engine.host


def test_a_store_that_reads_a_bad_block_of_a_window_registers_nothing():
    """Rule 13."""
    engine = Engine(FULL, WINDOW)
    engine.starts("abc")
    engine.computes("abc")
    transfers = engine.steps().transfers
    node = engine.gpu.find(checkpoint_key(b"abc"))
    engine.cache.invalidated(engine.gpu.checkpoints.pieces(node)[0])
    engine.reports(transfers)
    assert engine.checkpoints == set()


def test_a_block_that_went_to_a_piece_does_not_wait_any_more():
    """Or the lazy walk would wait for it, for ever."""
    engine = Engine(FULL, STATE, device=4)
    device = PooledDevice(engine.gpu)
    _, (block,) = engine.room_for_a_state()
    assert [device.is_waiting(each, None) for each in range(4)] == [each != block for each in range(4)]


def test_a_chunk_is_not_of_no_use_because_another_was_that_had_its_number():
    pool = BlockPool(3, needs_checkpoint=lambda depth: True)

    def put(name):
        [chunk] = pool.allocate(1)
        pool.commit([chunk], [name], pool.root, pool.touch(None))
        return chunk

    old = put(b"x")
    pool.commit(pool.allocate(0, needs=[PieceNeed("x", 1)]), [b"x!"], old, pool.touch(None))
    done = put(b"y")
    pool.resume_points.may_be_useless(done)
    pool.withdraw(done)
    assert put(b"z") == done  # of a request that runs
    pool.allocate(1)
    assert pool.find(b"z") is not None and pool.find(b"x!") is None


def test_the_host_must_hold_a_chunk_and_its_checkpoint():
    with pytest.raises(ConfigurationError, match="at least the 3 blocks of a chunk and its checkpoint, got 2"):
        Engine(FULL, STATE, SHORT, host=2)
    Engine(FULL, STATE, SHORT, host=3).serves("a")


def test_arc_where_chunks_take_no_blocks():
    """There are more of them than the pool has blocks, which ARC's lists are measured by."""
    engine = Engine(STATE, host=4, device=300, policy="arc")
    for prompt in ("abcdefgh", "ijklmnop", "abcdefgh", "ijklmnop", "abcdefgx", "qr", "st", "uv", "abcdefgy", "ijz"):
        engine.serves(prompt)
        engine.cache.check_valid()
    assert engine.checkpoints >= {"abcdefgy!", "ijz!"}


def test_lazy_goes_on_past_a_checkpoint_that_never_fits():
    """With all of its prefix it is larger than the pool: waiting for room would be waiting for ever."""
    engine = lazy(host=4, device=14)
    engine.gpu.allocate(0, needs=[PieceNeed("in use", 7)])
    engine.starts("abcd")
    engine.computes("abcd")
    engine.ends("abcd")
    engine.starts("x")
    engine.computes("x")
    engine.ends("x")
    engine.rests()
    assert engine.host == {"x", "x!"}


# rest

policies = pytest.mark.parametrize("policy", sorted(POLICIES))


@policies
def test_lazy_comes_to_rest_where_the_host_is_smaller_than_the_stretch(policy):
    """Each of the prompts fits with its state, but not both: what was evicted for the other is not stored again."""
    engine = Engine(FULL, STATE, mode="lazy", host=8, device=14, max_tokens=16 * GRID, policy=policy)
    for prompt in ("abcd", "vwxy"):
        engine.serves(prompt, keep=[4])
    engine.gpu.allocate(engine.gpu.statistics().free)
    engine.rests()  # or it would never end
    assert engine.cache.statistics().checkpoints_stored <= 4 and len(engine.checkpoints) == 1


@policies
def test_lazy_stores_no_part_of_what_never_fits(policy):
    """One chunk at a time may be on its way, and all of them with the state are more than the host has."""
    engine = Engine(FULL, STATE, mode="lazy", host=6, device=14, max_tokens=GRID, ahead_blocks=7, policy=policy)
    engine.serves("xy", keep=[2])
    engine.starts("abcdef")
    engine.computes("abcdef", keep=[6])
    engine.ends("abcdef")
    engine.gpu.allocate(engine.gpu.statistics().free)
    engine.rests()
    assert engine.host == {"x", "xy", "xy!"} and engine.cache.statistics().bytes_stored == 300


# the shared blocks


@policies
def test_a_piece_of_a_store_that_was_given_up_is_room_that_is_taken(policy):
    """It is right, for another checkpoint has it, and it moves still: evict that one and its blocks are not free."""
    engine = Engine(FULL, WINDOW, STATE, mode="lazy", host=9, device=40, max_tokens=16 * GRID, policy=policy)
    engine.gpu.allocate(26)

    def serves(prompt):
        engine.starts(prompt)
        engine.computes(prompt, keep=[len(prompt)])
        engine.ends(prompt)

    def steps():
        engine.cache.admit(Request("uses the device", chain("q" * 16), 16 * GRID), 16 * GRID, now=0.0)
        engine.cache.finished("uses the device", 16 * GRID)  # so that the walk looks again
        return engine.steps().transfers

    for prompt in ("ab", "a"):
        serves(prompt)
        while transfers := steps():
            engine.reports(transfers)
    serves("abb")
    moving = steps()
    engine.cache.invalidated([block for each in moving for copy in each.copies for block in copy.device_blocks])
    engine.gpu.withdraw(engine.gpu.find(b"abb"))
    serves("aba")
    moving += steps()
    engine.reports(moving)
    engine.rests()
    engine.cache.reset()
    now = engine.cache.statistics().pool
    assert (now.free, now.pinned) == (9, 0)


def test_a_piece_that_is_held_already_takes_no_room():
    """Rule 4: what is there counts as fitting."""
    engine = Engine(FULL, WINDOW, host=6, device=40)
    engine.serves("ab", keep=[2])
    lease = engine.cache.reserve(Request("r", chain("ab"), 9), 2 * GRID)
    engine.serves("abc", keep=[3])
    assert engine.checkpoints == {"ab!", "abc!"}
    engine.cache.release(lease)


def test_a_pool_of_chunks_only_has_no_checkpoints():
    with pytest.raises(MisuseError, match="without needs_checkpoint"):
        BlockPool(2).allocate(0, needs=[PieceNeed("x", 1)])


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_a_declined_checkpoint_is_not_stored_in_part(mode):
    """The policy would take its chunks, but these are of no use without it (rule 9)."""
    engine = Engine(FULL, STATE, mode=mode, host=16, device=14, max_tokens=16 * GRID)
    engine.cache.pool.choose = lambda parent, keys, needs=None, **_: len(keys) - (needs is not None)
    engine.serves("abcd", keep=[4])
    engine.gpu.allocate(engine.gpu.statistics().free)
    engine.rests()
    statistics = engine.cache.statistics()
    assert statistics.checkpoints_stored == 0 and statistics.store_declined > 0
    assert mode == "eager" or statistics.chunks_stored == 0


def test_a_large_checkpoint_that_has_left_makes_no_room_slower():
    """The number of victims follows from the checkpoints here now, not from the largest that ever was."""
    pool = BlockPool(40, needs_checkpoint=lambda depth: depth == 1)

    def put(name, needs=()):
        touch, (chunk,) = pool.touch(None), pool.allocate(1)
        pool.commit([chunk], [name], pool.root, touch)
        return pool.allocate(0, needs=needs), chunk, touch

    new, chunk, touch = put(b"a", [PieceNeed("state of a", 20)])
    pool.commit(new, [checkpoint_key(b"a")], chunk, touch)
    pool.withdraw(chunk)
    for name in (b"%02d" % at for at in range(20)):
        new, chunk, touch = put(name, [PieceNeed(name, 1)])
        pool.commit(new, [checkpoint_key(name)], chunk, touch)
    asked, evict, choose = [], pool._policy.evict, pool._policy.choose
    pool._policy.evict = lambda count, *keys: asked.append(count) or evict(count, *keys)
    pool._policy.choose = lambda parent, keys, count, margin: asked.append(count) or choose(parent, keys, count)
    assert pool.choose(pool.root, [b"x", b"y"]) == 2
    pool.allocate(20)
    assert asked[0] == 2, "two chunks take the room of two nodes, not of a twentieth of the largest one"
    assert len(asked) - 1 <= 2, asked
    pool.check_valid()


def test_a_full_pool_reports_the_blocks_that_the_checkpoint_would_take():
    """Neither a chunk that it would hang below, nor pieces; and the checkpoint that it would share one with stays."""
    pool = BlockPool(4, needs_checkpoint=lambda depth: True)
    touch = pool.touch(None)
    [chunk] = pool.allocate(1)
    pool.commit([chunk], [b"a" * 16], pool.root, touch)
    pool.commit(pool.allocate(0, needs=[PieceNeed("x", 1)]), [b"A" * 16], chunk, touch)
    pool.pin(chunk)
    with pytest.raises(PoolExhausted) as raised:
        pool.allocate(1, needs=[PieceNeed("x", 1), PieceNeed("y", 2)])
    assert (raised.value.wanted, raised.value.available) == (2, 0)
    statistics = pool.statistics()
    assert (statistics.free, statistics.writing, statistics.cached, statistics.retired) == (2, 0, 2, 0)
    pool.check_valid()
    assert len(pool.allocate(1, needs=[PieceNeed("x", 1), PieceNeed("y", 1)])) == 2


def test_room_for_a_wide_checkpoint_is_made_at_once():
    """Blocks are evicted as if every victim were as wide as the widest that is there, and that is narrow."""
    pool = BlockPool(64, needs_checkpoint=lambda depth: False)
    keys = [bytes([at]) * 16 for at in range(64)]
    pool.commit(pool.allocate(64, keys), keys, pool.root, pool.touch(None))
    calls = []
    evict = pool._policy.evict
    pool._policy.evict = lambda count, *incoming: calls.append(count) or evict(count, *incoming)
    pool.allocate(0, needs=[PieceNeed("wide", 32)])
    assert calls == [32]
