"""Windows that vLLM does not cache (`bounded_replay`, DeepSeek V4.1): after a hit it computes their tokens again.

    prompt of 30 tokens   0       4       8       12      16      20      24      28  30
    latents               x-------x-------x-------x-------x-------x-------x-------x         cached, and kept by the host
    window of 8                                                         x---------------x   computed again: 20 to 27,
    resumed at                                                                          28  which leave latents alone

A hit of no more tokens than the window is none, on the device and on the host. The engine checks in every step that
what is left alone is right, and that the window has all that a token sees (`engine.py`). (Windows here are no multiple
of a block and one token more: after a hit vLLM has no block for the first token of such a one.)
"""

import pytest
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

from tests.vllm.engine import LOADING, POISON, Engine, full, latent, replayed
from tests.vllm.test_groups import forget, last_boundary, noise, resumed, start  # noqa: F401 a fixture
from tests.vllm.test_stress import Users

pytestmark = pytest.mark.skipif(
    "bounded_replay" not in SlidingWindowMLASpec.__dataclass_fields__, reason="vLLM replays windows from 0.31 on"
)

MODELS = {
    "latent": lambda: [latent(), replayed(8)],
    "less than a block": lambda: [latent(), replayed(3)],
    "window 8 first": lambda: [replayed(11, block=8), latent()],
    "latent 16, window 4": lambda: [latent(block=16), replayed(8)],
    "two": lambda: [full(), latent(), replayed(6)],
}
PROMPT = list(range(30))

every_model = pytest.mark.parametrize("model", MODELS)
both_modes = pytest.mark.parametrize("offload", ["lazy", "eager"])


def window_of(engine: Engine) -> int:
    return engine.scheduler.prefix_replay_tokens


@both_modes
@every_model
def test_a_prompt_resumes_from_the_host_where_it_would_from_the_device(start, model, offload):  # noqa: F811
    """For all lengths. Where the device had forgotten, it is as if it had not: the same hits, the same answers."""
    keeps = start(MODELS[model](), device_blocks=3000, offload=offload)
    forgets = start(MODELS[model](), offload=offload)
    hits = set()
    for length in range(2, 50):
        prompt = [1000 * length + at for at in range(length)]
        said = keeps.run(prompt)
        assert forgets.run(prompt) == said
        forget(forgets, said)
        on_device, _ = resumed(keeps, prompt)
        assert resumed(forgets, prompt) == (0, on_device)
        assert keeps.finished[-1] == forgets.finished[-1] == said
        end = last_boundary(keeps, prompt)
        assert on_device == (end if end > window_of(keeps) else 0)
        hits.add(on_device)
    assert 0 in hits and len(hits) > 2
    assert forgets.counts["loads done"] > 0 and keeps.counts["loads planned"] == 0
    forgets.check_nothing_leaked()


@every_model
def test_nothing_of_the_window_is_kept(start, model):  # noqa: F811
    engine = start(MODELS[model](), offload="eager")
    engine.run(PROMPT, max_tokens=1)
    planner, chunks = engine.cache.planner, len(PROMPT) // engine.grid
    kept = [group.name for group in planner.groups]
    assert len(kept) == len(engine.model.cached) and all(name.startswith("prefix") for name in kept)
    assert engine.cache.pool.statistics().cached == chunks * sum(piece.host_blocks for piece in planner.pieces)


@every_model
def test_the_second_prompt_with_a_common_beginning_hits(start, model):  # noqa: F811
    engine = start(MODELS[model]())
    common = list(range(2 * 16 + 2))
    first = engine.run([*common, *noise(engine, 20)])
    forget(engine, first)
    assert resumed(engine, [*common, *noise(engine, 20)]) == (0, len(common) // engine.grid * engine.grid)


@both_modes
def test_the_device_has_no_more_than_the_window_and_the_host_has_more(start, offload):  # noqa: F811
    """vLLM takes what the device has, if what is loaded brings the hit over the window, and else computes all of it."""
    engine = start(MODELS["latent"](), offload=offload)
    said = engine.run(PROMPT)
    forget(engine, said)
    engine.run(PROMPT[:9], max_tokens=1)
    assert engine.on_device(PROMPT)[0] == [0, 1]  # 8 tokens
    assert resumed(engine, PROMPT[:9]) == (0, 0)
    assert resumed(engine, PROMPT) == (8, 28)
    assert engine.finished[-1] == said
    engine.check_nothing_leaked()


@pytest.mark.parametrize("step_tokens", [1, 2, 5, 9, 12])
@every_model
def test_tokens_are_replayed_in_short_steps(start, model, step_tokens):  # noqa: F811
    engine = start(MODELS[model](), offload="eager", step_tokens=step_tokens, max_requests=1)
    said = engine.run(PROMPT)
    forget(engine, said)
    assert resumed(engine, PROMPT)[1] == last_boundary(engine, PROMPT)
    assert engine.finished[-1] == said
    engine.check_nothing_leaked()


def test_chunks_that_one_request_replays_are_stored_for_another_at_once(start):  # noqa: F811
    """It hits what the other computes in the same step, and leaves it alone in the next."""
    engine = start(MODELS["latent"](), offload="eager", device_blocks=300, step_tokens=34, max_requests=2)
    engine.submit(PROMPT, max_tokens=20)
    engine.submit([*PROMPT, *noise(engine, 9)], max_tokens=1)
    engine.step()
    assert engine.admitted[-1] == (28, 28)
    assert [request.num_computed_tokens for request in engine.requests.values()] == [30, 24]
    engine.step()
    assert all(engine.cache.pool.find(key) is not None for key in engine.keys(PROMPT))
    assert engine.counts["blocks hidden until computed"] == 0


def test_a_load_that_fails_is_computed_with_its_window(start):  # noqa: F811
    engine = start(MODELS["latent"](), offload="eager")
    said = engine.run(PROMPT)
    for before in ((), PROMPT[:9], PROMPT[:17]):
        forget(engine, said)
        if before:
            engine.run(list(before), max_tokens=1)
        for rank in engine.ranks:
            rank.failure_rate = 1
        id = engine.submit(PROMPT)
        while engine.requests[id].status is not LOADING:
            engine.step()
        for rank in engine.ranks:
            rank.failure_rate = 0
        engine.drain()
        assert engine.finished[-1] == said
        engine.run(PROMPT)  # and stored again
    assert engine.counts["loads failed"] == 3
    engine.check_nothing_leaked()


@pytest.mark.parametrize("block", range(7))
def test_a_wrong_byte_of_what_is_not_computed_again_is_noticed(start, block):  # noqa: F811
    """The control of all tests here: also where tokens are replayed, the latents that were loaded are read."""
    engine = start(MODELS["latent"](), offload="eager")
    forget(engine, engine.run(PROMPT))
    id = engine.submit(PROMPT)
    while engine.requests[id].status is not LOADING:
        engine.step()
    while engine.requests[id].status is LOADING and not engine.counts["loads done"]:
        engine.step()
    table = engine.scheduler.kv_cache_manager.get_block_ids(id)[0]
    engine.ranks[0].device[table[block]] = POISON
    with pytest.raises(AssertionError, match="reads wrong KV"):
        engine.drain()


def test_a_window_that_is_not_computed_again_is_noticed(start, monkeypatch):  # noqa: F811
    """As if the load brought the window, which the host does not have."""
    engine = start(MODELS["latent"](), offload="eager")
    forget(engine, engine.run(PROMPT))
    monkeypatch.setattr(engine.scheduler, "_mark_prefix_replay", lambda *args, **kwargs: 0)
    with pytest.raises(AssertionError, match="in group 1"):
        engine.run(PROMPT)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in turn", "overlapping"])
@both_modes
@every_model
def test_many_conversations(tmp_path, model, offload, asynchronous):
    """With failures, preemption and aborts. Each step checks the bytes."""
    groups = MODELS[model]()
    size = dict(device_blocks=20 + 30 * len(groups), host_blocks=300)  # room for the longest prompt
    engine = Engine(
        tmp_path, groups=groups, offload=offload, failure_rate=0.03, seed=4, asynchronous=asynchronous, ranks=2, **size
    )
    users = Users(engine)
    while engine.counts["submitted"] < 200:
        while len(engine.requests) < 6:
            users.speak()
        if engine.random.random() < 0.02:
            engine.abort(engine.random.choice(list(engine.requests)))
        engine.step()
    engine.drain()
    assert engine.counts["loads done"] > 5
    engine.check_nothing_leaked()


@both_modes
def test_blocks_of_a_hit_that_another_connector_declines_count_as_unwritten(start, offload, monkeypatch):  # noqa: F811
    """As in a MultiConnector: this one offers more than the window has, and what vLLM then has is less, so none."""
    engine = start([latent(), replayed(8)], offload=offload)
    forget(engine, engine.run(PROMPT))
    engine.run(PROMPT[:9], max_tokens=1)
    assert engine.on_device(PROMPT)[0] == [0, 1]
    offered, hidden, half = [], [], engine.half
    lookup, plan = engine.scheduler.connector.get_num_new_matched_tokens, half._plan

    def decline(request, n0):
        offered.append(lookup(request, n0))
        return 0, False

    def watched(output):
        unwritten = set(half._unwritten_hashes())
        requests = [engine.requests[id] for id in output.num_scheduled_tokens]
        hidden.extend([each in unwritten for each in request.block_hashes] for request in requests)
        return plan(output)

    monkeypatch.setattr(engine.scheduler.connector, "get_num_new_matched_tokens", decline)
    monkeypatch.setattr(half, "_plan", watched)
    engine.submit(PROMPT, max_tokens=1)
    engine.step()
    engine.drain()
    assert offered[0][0] > 0 and hidden[0] == [True] * len(hidden[0])
