"""A hint that a session goes on: its prompt is read from the tier to the host before its next request comes.

turn 1 of session "a"    ends; device and host forget it, the tier has it
another request          has the hint `kv.prefetch` of session "a"
turn 2                   hits on the host, and does not wait for the tier
"""

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from connector.vllm import sessions
from connector.vllm.kv_hints import PREFETCH
from tests.vllm.engine import BLOCK, Engine, full, window

PROMPT = list(range(30))
HIT = 28 // BLOCK * BLOCK


def hint(**payload: object) -> dict[str, object]:
    return {"kv_hints": KvHintsEnvelope("1.0", "m", [KvHintAction("0", "kv.prefetch", "1.0", payload)])}


BY_ENVELOPE, BY_PARAMS = hint(session_id="a"), {"params": {PREFETCH: "a"}}


@pytest.fixture
def start(tmp_path):
    """An engine after the first turn of session "a", which only the tier has."""

    def start(**options):
        usual = dict(offload="eager", host_blocks=60, tier_slots=500, tier={"offload": "eager"}, slowest=1)
        engine = Engine(tmp_path, **usual | options)
        engine.drain()
        first = engine.submit(PROMPT, session_id="a")
        engine.drain()
        assert first not in engine.requests
        while any(engine.cache.pool.find(key) for key in engine.keys(PROMPT)) or engine.on_device(PROMPT)[0]:
            engine.run([engine.random.randrange(500, 900) for _ in range(30)])
        return engine

    return start


def on_host(engine: Engine) -> int:
    """Tokens of the prompt."""
    return engine.cache.pool.resident_run(keys := engine.keys(PROMPT), 0, len(keys)) * engine.grid


def steps_of(engine: Engine, tokens: list[int]) -> int:
    """How many steps a request takes."""
    id, steps = engine.submit(tokens, max_tokens=1, session_id="a"), 0
    while id in engine.requests:
        engine.step()
        steps += 1
    return steps


def counted(engine: Engine) -> list[int]:
    return [engine.half._sessions.counts[outcome] for outcome in sessions.OUTCOMES]


@pytest.mark.parametrize("groups", [None, [full(), window(9)]], ids=["full", "full, window"])
@pytest.mark.parametrize("given", [BY_ENVELOPE, BY_PARAMS], ids=["envelope", "params"])
def test_a_session_that_is_to_go_on_is_on_the_host_when_it_does(start, given, groups):
    engine = start(groups=groups, device_blocks=80)
    engine.submit([7] * 9, **given)
    engine.drain()
    assert on_host(engine) == HIT and counted(engine) == [1, 0, 0]
    assert steps_of(engine, PROMPT) == 2  # the load, and the rest
    assert engine.admitted[-1] == (0, HIT)
    statistics = engine.cache.tier_statistics()
    assert (statistics.read_ahead, statistics.asked) == (1, 0)
    engine.check_nothing_leaked()


def test_control_without_the_hint_it_waits_for_the_tier(start):
    engine = start()
    engine.submit([7] * 9)
    engine.drain()
    assert on_host(engine) == 0
    assert steps_of(engine, PROMPT) > 2
    assert engine.admitted[-1] == (0, HIT)
    statistics = engine.cache.tier_statistics()
    assert (statistics.read_ahead, statistics.asked) == (0, 1)


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        (hint(session_id="b"), [0, 1, 0]),
        (hint(session_id=["a"]), [0, 0, 1]),
        (hint(session_id=None), [0, 0, 1]),
        (hint(), [0, 0, 0]),
        ({"params": {PREFETCH: 7}}, [0, 0, 1]),
        (hint(session_id="a") | {"cache_salt": "of others"}, [0, 1, 0]),
    ],
)
def test_a_hint_that_cannot_be_used_stops_no_request(start, given, outcome):
    engine = start()
    engine.submit([7] * 9, **given)
    engine.drain()
    assert len(engine.finished[-1]) == 13 and on_host(engine) == 0 and counted(engine) == outcome


def test_blocks_that_running_requests_load_stay(start):
    """The host is full of what two requests are loading, all of it pinned."""
    engine = start(slowest=30, device_blocks=60)
    others = [[1000 * number + at for at in range(100)] for number in (1, 2)]
    for prompt in others:
        engine.run(prompt)
    engine.pool.reset_prefix_cache()
    for prompt in others:
        engine.submit(prompt)
    engine.submit([7] * 9, **BY_ENVELOPE)
    engine.drain()
    assert engine.admitted[-3:-1] == [(0, 96)] * 2
    engine.check_nothing_leaked()


def test_a_session_without_a_whole_block_is_not_kept(start):
    engine = start()
    engine.submit([3] * (BLOCK - 2), session_id="short", max_tokens=1)
    engine.drain()
    assert ("short", None) not in engine.half._sessions._hashes


def test_sessions_that_ended_longest_ago_are_forgotten(start, monkeypatch):
    monkeypatch.setattr(sessions, "MOST_HASHES", 20)
    engine = start()
    for name in "bcd":
        engine.submit(PROMPT[:20], session_id=name)
        engine.drain()
    known = engine.half._sessions
    assert [of for of, _ in known._hashes] == ["b", "c", "d"]
    assert known._kept == sum(map(len, known._hashes.values())) <= 20
