"""Hundreds of requests through every model of test_groups.py, with everything going wrong that may.

Users are those of test_stress.py. Accidents happen in turn, each as soon as its moment has come, so that all of them
happen to every model. Each test counts them, and fails if one did not happen.
"""

from collections.abc import Callable

import pytest
from vllm.v1.request import RequestStatus

from tests.vllm.engine import AT_ONCE, LOADING, RUNNING, Engine, full, state, window
from tests.vllm.test_groups import ATTENTION_ONLY, MODELS, PURE
from tests.vllm.test_stress import Users

ALWAYS = (
    "hit",
    "miss",
    "pending",
    "loads failed",
    "loads cancelled",
    "stores planned",
    "aborts while WAITING",
    "aborts while RUNNING",
    "aborts while WAITING_FOR_REMOTE_KVS",
    "resets during a load",
    "resets during a store",
    "resets that preempt",
)


def hang_up_while(status: RequestStatus) -> Callable[[Engine], bool]:
    def hang_up(engine: Engine) -> bool:
        ids = [id for id, request in engine.requests.items() if request.status is status]
        for id in ids[:1]:
            engine.abort(id)
        return bool(ids)

    return hang_up


def fail_a_load(engine: Engine) -> bool:
    """On one rank, whatever becomes of it on the others."""
    loads = [copy for copy in engine.random.choice(engine.ranks).copies.values() if not copy.is_store]
    for copy in loads[:1]:
        copy.fails = True
    return bool(loads)


def reset_while(storing: bool) -> Callable[[Engine], bool]:
    def reset(engine: Engine) -> bool:
        moving = any(copy.is_store is storing for rank in engine.ranks for copy in rank.copies.values())
        if moving:
            engine.reset()
        return moving

    return reset


def restart(engine: Engine) -> bool:
    """Copies end at once until it has happened, for it cannot while there are loads."""
    happened = bool(engine.scheduler.running) and engine.restart_running()
    for rank in engine.ranks:
        rank.pace = None if happened else AT_ONCE
    return happened


ACCIDENTS = {  # and how many steps lie between them
    hang_up_while(LOADING): 60,
    hang_up_while(RUNNING): 60,
    fail_a_load: 60,
    restart: 130,
    reset_while(storing=False): 230,
    reset_while(storing=True): 270,
}


def live_through(engine: Engine, requests: int) -> None:
    users, random = Users(engine), engine.random
    due = dict(ACCIDENTS)  # each for the first time
    while engine.counts["submitted"] < requests:
        while len(engine.requests) < 12:
            users.speak()
        if random.random() < 0.04:
            users.hang_up()
        for accident, step in due.items():
            if engine.counts["steps"] >= step and accident(engine):
                due[accident] = engine.counts["steps"] + ACCIDENTS[accident]
        engine.step()
        if engine.counts["steps"] % 50 == 0:
            engine.cache.check_valid()
    engine.drain()


def check_lived(engine: Engine, model: str, loads: int) -> None:
    statistics = engine.cache.statistics()
    print(sorted(engine.counts.items()), statistics)
    engine.check_nothing_leaked()
    missing = [what for what in ALWAYS if not engine.counts[what]]
    assert not missing, f"this never happened: {missing}"
    assert engine.counts["loads done"] >= loads
    assert model in ATTENTION_ONLY or statistics.checkpoints_stored >= loads


def device_blocks(model: str, few: int) -> int:
    """Blocks that press a model hard: `few` for each group where blocks are soon free again."""
    return few * len(MODELS[model]) if model in PURE else 24 + 24 * len(MODELS[model])


@pytest.mark.parametrize("offload", ["lazy", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_no_request_of_any_model_ever_reads_wrong_kv_and_nothing_leaks(tmp_path, model, offload):
    size = {"device_blocks": device_blocks(model, few=24), "host_blocks": 400}
    engine = Engine(tmp_path, groups=MODELS[model], offload=offload, failure_rate=0.03, seed=1, **size)
    live_through(engine, requests=300)
    check_lived(engine, model, loads=25)


@pytest.mark.parametrize("offload", ["lazy", "eager"])
@pytest.mark.parametrize("retention", [0, None], ids=["sparse", "dense"])
@pytest.mark.parametrize(
    "model",
    [
        "full, latent",
        "full, window",
        "full, state",
        "full, window, state",
        "window",
        "full 8, window",
        "full, full 8, window",
        "latent 16, windows 8 and 4",
        "windows 8 and 4",
    ],
)
def test_steps_that_overlap_and_ranks_that_drift_apart(tmp_path, model, retention, offload):
    size = {"device_blocks": device_blocks(model, few=30), "host_blocks": 400}
    varied = {"ranks": 2, "asynchronous": True, "retention": retention, "failure_rate": 0.02}
    engine = Engine(tmp_path, groups=MODELS[model], offload=offload, seed=2, **size, **varied)
    live_through(engine, requests=300)
    check_lived(engine, model, loads=25)


@pytest.mark.parametrize("offload", ["lazy", "eager"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize(("other", "copies"), [(state(block=8), True), (window(11, block=8), False)])
def test_hashes_shorter_than_blocks(tmp_path, other, copies, asynchronous, offload):
    """Beside states vLLM then has hits that end within a block, of which it makes a copy for the request."""
    varied = {"match_unit": 4, "asynchronous": asynchronous, "failure_rate": 0.03, "seed": 4}
    engine = Engine(
        tmp_path, groups=[full(block=8), other], offload=offload, device_blocks=80, host_blocks=400, **varied
    )
    live_through(engine, requests=300)
    check_lived(engine, "full, other", loads=25)
    assert (engine.counts["blocks copied"] > 0) is copies


@pytest.mark.parametrize("offload", ["lazy", "eager"])
@pytest.mark.parametrize("retention", [0, None], ids=["sparse", "dense"])
@pytest.mark.parametrize("groups", [[full(block=8), state()], [full(), full(block=8), state()]])
def test_states_more_often_than_all_groups_have_a_boundary(tmp_path, groups, retention, offload):
    """vLLM ends prompts' steps where a state's block ends, and half of these are no boundaries: there it has none."""
    size = {"device_blocks": 24 + 24 * len(groups), "host_blocks": 400}
    engine = Engine(tmp_path, groups=groups, offload=offload, retention=retention, failure_rate=0.03, seed=5, **size)
    live_through(engine, requests=300)
    check_lived(engine, "full, state", loads=15)


@pytest.mark.parametrize(("model", "offload"), [("2 full, state", "lazy"), ("state", "eager")])
def test_steps_end_where_states_are_wanted(tmp_path, model, offload):
    """At intervals of two boundaries, where requests are preempted, aborted and resumed as well."""
    size = {"device_blocks": device_blocks(model, few=20), "host_blocks": 400, "checkpoint_interval": 8}
    varied = {"asynchronous": True, "step_tokens": 30, "failure_rate": 0.03, "seed": 6}
    engine = Engine(tmp_path, groups=MODELS[model], offload=offload, **size, **varied)
    live_through(engine, requests=200)
    check_lived(engine, model, loads=15)


@pytest.mark.parametrize("offload", ["lazy", "eager"])
@pytest.mark.parametrize("model", ["latent", "full, local", "2 full, state", "state", "full 8, full"])
def test_short_steps_and_slow_copies(tmp_path, model, offload):
    size = {"device_blocks": device_blocks(model, few=12), "host_blocks": 200}
    slow = {"step_tokens": 14, "slowest": 12, "failure_rate": 0.03}
    engine = Engine(tmp_path, groups=MODELS[model], offload=offload, seed=3, **size, **slow)
    live_through(engine, requests=250)
    check_lived(engine, model, loads=10)


@pytest.mark.parametrize(("offload", "policy"), [("lazy", "adaptive"), ("eager", "arc")])
def test_requests_that_come_before_others(tmp_path, offload, policy):
    """vLLM then puts a request in front of those that load, and preempts the least important."""
    varied = {"priorities": True, "offload": offload, "policy": policy, "failure_rate": 0.03, "seed": 6}
    engine = Engine(tmp_path, groups=MODELS["full, window, state"], device_blocks=90, host_blocks=400, **varied)
    live_through(engine, requests=300)
    check_lived(engine, "full, window, state", loads=25)
    assert engine.counts["preemptions"] > 0
