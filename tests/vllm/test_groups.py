"""Short stories about models with several groups, and with groups beside full attention or without it.

Every story runs for each model below. Bytes that a step reads and that a load brings are checked by the engine in every
step (`engine.py`); the stories check where requests resume. Blocks are of 4 tokens, and with `retention=0`, vLLM's
default, the device keeps windows and states at the last boundary of each prompt, and where it has seen a branch:

    prompt of 30 tokens     0       4       8       12      16      20      24      28  30
    full attention          x-------x-------x-------x-------x-------x-------x-------x       every block
    window of 9                                                     x-------x-------x       what token 28 sees
    local chunks of 12                                                      x-------x       since its local chunk began
    state                                                                           x       after token 27
    resumed at                                                                      28
"""

import pytest

from connector.common.request_flags import STORE
from cpu_prefix_cache.model.hashing import checkpoint_key
from tests.vllm.engine import (
    BLOCK,
    LOADING,
    NEVER,
    NULL,
    Engine,
    Part,
    full,
    latent,
    local,
    state,
    window,
)

MODELS = {
    "full": [full()],
    "latent": [latent()],
    "full, latent": [full(), latent()],
    "full, window": [full(), window(9, layers=1)],
    "full, 2 windows": [full(), window(9), window(9)],
    "full, local": [full(), local(12)],
    "full, state": [full(), state()],
    "full, window, state": [full(), window(6), state()],
    "2 full, state": [full(), full(), state()],
    "window": [window(9)],
    "state": [state()],
    # Blocks of different lengths: a hit ends where blocks of all groups do
    "full 8, window": [full(block=8), window(11)],
    "full, window 8": [full(), window(11, block=8)],
    "full 12, window 8": [full(block=12), window(11, block=8)],
    "full 8, full": [full(block=8), full()],
    "full, full 8, window": [full(), full(block=8), window(7)],
    "full, local 8": [full(), local(16, block=8)],
    "latent 16, windows 8 and 4": [latent(block=16), window(9, block=8), window(3)],
    "windows 8 and 4": [window(9, block=8), window(6)],
}
PURE = ("window", "state", "windows 8 and 4")  # nothing in every chunk
ATTENTION_ONLY = ("full", "latent", "full, latent", "full 8, full")  # something in every chunk, and no more
LOCAL = ("full, local", "full, local 8")
HYBRID = tuple(name for name in MODELS if name not in ATTENTION_ONLY)

PROMPT = list(range(30))

every_model = pytest.mark.parametrize("model", MODELS)
both_modes = pytest.mark.parametrize("offload", ["lazy", "eager"])


@pytest.fixture
def start(tmp_path):
    """An engine at rest, whose host memory is ready, with a device that holds two prompts and is soon flooded."""

    def start(model="full, window, state", **options):
        groups = MODELS[model] if isinstance(model, str) else model
        usual = {"groups": groups, "device_blocks": 14 + 16 * len(groups), "host_blocks": 2000, "slowest": 1}
        engine = Engine(tmp_path, **usual | options)
        while engine.cache.pool.statistics().ready < engine.cache.pool.capacity:
            engine.step()
        return engine

    return start


def forget(engine: Engine, *prompts: list[int]) -> None:
    """Run other prompts until the device has nothing of these any more."""
    for _ in range(200):
        if not any(blocks for prompt in prompts for blocks in engine.on_device(prompt)):
            return
        engine.run(noise(engine, engine.random.randrange(20, 40)))
    raise AssertionError("the device does not forget")


def noise(engine: Engine, length: int) -> list[int]:
    return [engine.random.randrange(500, 900) for _ in range(length)]


def last_boundary(engine: Engine, tokens: list[int]) -> int:
    return (len(tokens) - 1) // engine.grid * engine.grid


def resumed(engine: Engine, tokens: list[int], max_tokens: int = 4) -> tuple[int, int]:
    """How many tokens of a prompt the device had when it was run, and how many there were after the load."""
    before = len(engine.admitted)
    engine.run(tokens, max_tokens)
    assert len(engine.admitted) == before + 1
    return engine.admitted[-1]


# Coming back


@both_modes
@every_model
def test_a_prompt_the_device_forgot_comes_back_at_its_last_boundary(start, model, offload):
    engine = start(model, offload=offload)
    for length in (27, 28, 29, 30):
        prompt = [1000 * length + at for at in range(length)]
        said = engine.run(prompt)
        forget(engine, said)
        assert resumed(engine, prompt) == (0, last_boundary(engine, prompt))
        assert engine.finished[-1] == said
    assert engine.counts["loads done"] == 4
    engine.check_nothing_leaked()


@pytest.mark.parametrize("model", ["full", "full, window, state", "latent"])
def test_eight_requests_at_once_load_what_they_have_in_common_once(start, model):  # rule 12
    engine = start(model, offload="eager", device_blocks=400)
    prompt = noise(engine, 160)
    for tail in ("once", "twice"):  # windows and states are kept where two have parted
        engine.run([*prompt, *range(len(tail))])
    engine.pool.reset_prefix_cache()
    before = engine.cache.statistics().bytes_loaded
    resumed(engine, [*prompt, 10])
    alone = engine.cache.statistics().bytes_loaded - before
    engine.pool.reset_prefix_cache()
    for number in range(8):
        engine.submit([*prompt, 20 + number])
    engine.drain()
    assert 0 < engine.cache.statistics().bytes_loaded - before - alone <= 1.25 * alone
    engine.check_nothing_leaked()


@every_model
def test_a_prompt_the_device_still_has_is_not_loaded(start, model):
    engine = start(model, offload="eager")
    engine.run(PROMPT)
    assert resumed(engine, PROMPT) == (last_boundary(engine, PROMPT),) * 2
    assert engine.counts["loads planned"] == 0


@every_model
def test_a_prompt_of_hardly_a_chunk_is_loaded_when_it_has_one_before_its_last_token(start, model):  # S7.27
    engine = start(model, offload="eager")
    for length in (1, engine.grid - 1, engine.grid, engine.grid + 1):
        prompt = [1000 * length + at for at in range(length)]
        said = engine.run(prompt)
        forget(engine, said)
        assert resumed(engine, prompt) == (0, engine.grid if length > engine.grid else 0)
        assert engine.finished[-1] == said


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 16, 17, 40])
@pytest.mark.parametrize("with_full", [True, False], ids=["with full", "alone"])
def test_windows_smaller_than_a_block_and_around_its_multiples(start, tokens, with_full):  # S7.32
    if tokens == 1 and not with_full:
        pytest.skip("such a model has nothing to keep")
    engine = start([full(), window(tokens)] if with_full else [window(tokens)], offload="eager")
    for length in (28, 29, 30):
        prompt = [1000 * length + at for at in range(length)]
        said = engine.run(prompt, max_tokens=9)
        forget(engine, said)
        assert resumed(engine, prompt, max_tokens=9) == (0, last_boundary(engine, prompt))
        assert engine.finished[-1] == said
    engine.check_nothing_leaked()


@both_modes
def test_at_the_edge_of_a_local_chunk_its_group_needs_nothing(start, offload):  # S7.34
    engine = start([full(), local(12)], offload=offload)
    for length in (12, 13, 14, 16, 17, 23, 24, 25, 28, 29):
        prompt = [1000 * length + at for at in range(length)]
        said = engine.run(prompt)
        forget(engine, said)
        boundary = last_boundary(engine, prompt)
        assert resumed(engine, prompt) == (0, boundary)
        assert len(engine.cache.coordinator.planner.checkpoint(boundary // BLOCK)) == boundary % 12 // BLOCK


@every_model
def test_only_what_lies_behind_the_device_s_part_is_loaded(start, model):
    """Also where a window reaches back into the part that the device has."""
    engine = start(model, offload="eager", retention=None)
    prompts = [list(range(chunks * engine.grid + 1)) for chunks in (4, 5, 6, 7)]
    for prompt in prompts:
        engine.run(prompt)
    for prompt in prompts[1:]:
        forget(engine, prompt)
        engine.run(prompts[0])
        assert resumed(engine, prompt) == (4 * engine.grid, last_boundary(engine, prompt))
    engine.check_nothing_leaked()


@both_modes
@every_model
def test_a_conversation_goes_on_where_its_prompt_ended(start, model, offload):
    engine = start(model, offload=offload)
    said = engine.run(PROMPT, max_tokens=13)
    forget(engine, said)
    end = PROMPT if model in HYBRID and model not in LOCAL else said
    assert resumed(engine, [*said, 1, 2, 3]) == (0, last_boundary(engine, end))
    engine.check_nothing_leaked()


@both_modes
@pytest.mark.parametrize("model", PURE)
def test_an_answer_that_ends_behind_a_boundary_without_prefix_groups(start, model, offload):
    engine = start(model, offload=offload, retention=None)
    said = engine.run(PROMPT, max_tokens=3)  # 33 tokens, of which the last is not computed
    forget(engine, said)
    assert resumed(engine, [*said, 1, 2, 3]) == (0, last_boundary(engine, said))


@both_modes
@every_model
def test_where_the_device_keeps_every_boundary_a_conversation_goes_on_where_its_answer_ended(start, model, offload):
    """In short steps: one that allocates more than half of the device may lose what lazy has not stored yet."""
    engine = start(model, offload=offload, retention=None, step_tokens=8)
    for answer in (4, 5, 6):
        said = engine.run([1000 * answer + at for at in range(30)], max_tokens=answer)
        forget(engine, said)
        assert resumed(engine, [*said, 1, 2, 3]) == (0, last_boundary(engine, said))


def a_branch(engine: Engine) -> tuple[int, int]:
    """Where the third of three prompts is resumed that have half a chunk more than four in common."""
    common = list(range(4 * engine.grid + engine.grid // 2))
    first, second, third = (common + noise(engine, 2 * engine.grid + 1) for _ in range(3))
    engine.run(first)
    engine.run(second)
    forget(engine, first, second)
    return resumed(engine, third)


@both_modes
@pytest.mark.parametrize("model", [name for name in MODELS if name not in PURE])
def test_the_third_prompt_with_a_common_beginning_resumes_at_the_branch(start, model, offload):
    engine = start(model, offload=offload)
    assert a_branch(engine) == (0, 4 * engine.grid)
    engine.check_nothing_leaked()


@both_modes
@every_model
def test_it_does_so_although_the_device_had_forgotten_the_first_before_the_second_came(start, model, offload):
    """The host alone knows where the second departs, and has vLLM keep windows and states there."""
    engine = start(model, offload=offload)
    common = list(range(4 * engine.grid + engine.grid // 2))
    first, second, third = (common + noise(engine, 2 * engine.grid + 1) for _ in range(3))
    for prompt in (first, second):
        engine.run(prompt)
        forget(engine, prompt)
    assert resumed(engine, third) == (0, 4 * engine.grid)
    engine.check_nothing_leaked()


@both_modes
@pytest.mark.parametrize("asynchronous", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("model", ["full, state", "2 full, state", "state"])
def test_the_second_prompt_resumes_where_a_state_is_kept_at_an_interval(start, model, asynchronous, offload):
    """vLLM has no interval of its own, and ends steps where the connector wants these states."""
    engine = start(model, offload=offload, checkpoint_interval=16, step_tokens=128, asynchronous=asynchronous)
    common = list(range(70))
    first, second, third = (common + noise(engine, 9) for _ in range(3))
    for prompt, expected in ((first, 0), (second, 64), (third, 68)):
        assert resumed(engine, prompt) == (0, expected)
        forget(engine, prompt)
    engine.check_nothing_leaked()


@both_modes
def test_control_without_the_interval_the_second_computes_all(start, offload):
    engine = start("full, state", offload=offload, step_tokens=128)
    for _ in range(2):
        prompt = [*range(70), *noise(engine, 9)]
        assert resumed(engine, prompt) == (0, 0)
        forget(engine, prompt)


@pytest.mark.parametrize(("params", "expected"), [({STORE: False}, [68, 70]), (None, [16, 32, 48, 64, 68, 70])])
def test_the_interval_ends_no_step_of_a_request_that_is_not_stored(start, params, expected):
    engine = start("full, state", checkpoint_interval=16, step_tokens=128)
    request = engine.requests[engine.submit([*range(70)], params=params)]
    ends = []
    while request.num_computed_tokens < 70:
        engine.step()
        ends.append(request.num_computed_tokens)
    assert ends == expected


@both_modes
def test_states_more_often_than_there_are_boundaries(start, offload):
    """By itself vLLM ends the steps of a prompt at the last block of states, which is a boundary in half of them."""
    engine = start([full(block=8), state()], offload=offload)
    for length in range(27, 35):
        prompt = [1000 * length + at for at in range(length)]
        engine.run(prompt)
        forget(engine, prompt)
        assert resumed(engine, prompt) == (0, last_boundary(engine, prompt))
    engine.check_nothing_leaked()


def test_a_request_that_is_preempted_or_aborted_leaves_no_step_to_end(start):
    engine = start("full, state", checkpoint_interval=8, step_tokens=8)
    request = engine.requests[engine.submit(list(range(60)))]
    engine.step()
    assert request.shared_prefix_boundary == 16
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    engine.step()
    engine.step()
    assert request.shared_prefix_boundary > 8
    engine.abort(request.request_id)
    engine.drain()
    engine.check_nothing_leaked()


@both_modes
@pytest.mark.parametrize("model", ["window", "windows 8 and 4"])
def test_a_window_alone_has_a_branch_where_the_device_keeps_every_boundary(start, model, offload):
    engine = start(model, offload=offload, retention=None)
    assert a_branch(engine) == (0, 4 * engine.grid)


# Steps


@pytest.mark.parametrize("step_tokens", [3, 9])
@every_model
def test_prompts_are_computed_and_stored_a_few_tokens_at_a_time(start, model, step_tokens):
    engine = start(model, offload="eager", step_tokens=step_tokens, max_requests=2)
    said = engine.run(PROMPT)
    forget(engine, said)
    assert resumed(engine, PROMPT) == (0, last_boundary(engine, PROMPT))
    assert engine.finished[-1] == said == start(model).run(PROMPT)
    engine.check_nothing_leaked()


@both_modes
def test_ranks_with_the_same_bytes_keep_them_once(start, offload):
    engine = start("latent", offload=offload, ranks=3, tensor_parallel=True, slowest=4)
    said = engine.run(PROMPT)
    forget(engine, said)
    assert resumed(engine, PROMPT) == (0, last_boundary(engine, PROMPT))
    assert all(rank.host is engine.ranks[0].host for rank in engine.ranks)
    engine.check_nothing_leaked()


@both_modes
@every_model
def test_steps_that_overlap_on_several_ranks(start, model, offload):
    engine = start(model, offload=offload, ranks=2, asynchronous=True, slowest=4)
    said = engine.run(PROMPT)
    forget(engine, said)
    assert resumed(engine, PROMPT) == (0, last_boundary(engine, PROMPT))
    assert engine.finished[-1] == said
    engine.check_nothing_leaked()


@pytest.mark.parametrize("model", HYBRID)
def test_a_checkpoint_cannot_be_stored_in_the_step_that_computes_it(start, model):  # S7.9
    """vLLM hashes its blocks before that."""
    engine = start(model)
    checkpoint = engine.cache.coordinator.checkpoint_at(engine.keys(PROMPT), len(PROMPT) // engine.grid)
    step, seen = engine.cache.step, []

    def step_and_look():
        seen.append(engine.device.find_checkpoint(checkpoint) is not None)
        return step()

    engine.cache.step = step_and_look
    engine.run(PROMPT)
    assert seen[:2] == [False, True]


@both_modes
@every_model
def test_two_with_one_prefix_load_it_once(start, model, offload):  # S7.26
    engine = start(model, offload=offload, slowest=3)
    said = engine.run(PROMPT)
    forget(engine, said)
    engine.submit([*PROMPT, 1])
    engine.submit([*PROMPT, 2])
    engine.drain()
    assert engine.counts["pending"] > 0
    assert engine.counts["loads planned"] == 1
    end = last_boundary(engine, PROMPT)
    assert engine.admitted[-2:] == [(0, end), (end, end)]


@both_modes
@every_model
def test_requests_that_lose_their_blocks_give_the_same_answer_in_the_end(start, model, offload):  # S7.16, S7.25
    prompts = [[100 * at + token for token in range(8)] for at in range(5)]
    alone = start(model, device_blocks=200)
    said = [alone.run(prompt, max_tokens=40) for prompt in prompts]
    few = sum(40 // group.kv_cache_spec.block_size for group in MODELS[model])
    engine = start(model, offload=offload, device_blocks=8 if model in PURE else 12 + few)
    for prompt in prompts:
        engine.submit(prompt, max_tokens=40)
    engine.drain()
    assert engine.counts["preemptions"] > 0
    assert sorted(engine.finished[-5:]) == sorted(said)
    engine.check_nothing_leaked()


# Eviction in lazy mode


@pytest.mark.parametrize("model", ["full, window", "full, 2 windows"])
def test_the_first_window_block_that_is_about_to_leave_brings_the_whole_checkpoint(start, model):  # S7.18
    """When the window moves on its blocks are freed one by one, while the request still has all the others."""
    engine = start(model, device_blocks=60)
    id = engine.submit(PROMPT, max_tokens=100)
    keys, host = engine.keys(PROMPT), engine.cache.coordinator
    engine.step()
    pieces = [engine.pool.blocks[block] for (block,) in engine.device.find_checkpoint(host.checkpoint_at(keys, 7))]
    while pieces[0].ref_cnt:
        engine.step()
    assert [block.ref_cnt for block in pieces] == [0, 1] * (len(pieces) // 2)
    while host.resume_node(keys, 7) is None:
        assert all(engine.device.find(key) for key in keys)
        engine.submit(noise(engine, 6), max_tokens=1)
        engine.step()
    assert id in engine.requests
    assert all(engine.cache.pool.find(key) is not None for key in keys)
    engine.drain()
    engine.check_nothing_leaked()


def test_the_deepest_chunk_that_is_about_to_leave_brings_its_checkpoint(start):
    """After a short answer full attention is freed first, and the window behind all of it."""
    engine = start("full, window", device_blocks=60)
    prompt = list(range(102))
    engine.run(prompt, max_tokens=1)
    forget(engine, prompt)
    assert resumed(engine, prompt) == (0, 100)


def test_states_of_prompts_of_many_chunks_are_stored_before_they_leave(start):
    engine = start("state", offload="lazy")
    prompts = [[1000 * length + at for at in range(30)] for length in range(1, 6)]
    for prompt in prompts:
        engine.run(prompt)
        forget(engine, prompt)
    assert [resumed(engine, prompt) for prompt in prompts] == [(0, 28)] * 5


@both_modes
@every_model
def test_a_device_without_room_for_more_is_remembered_in_proportion(start, model, offload):
    """Nothing that is remembered of the device grows with the number of prompts."""
    engine = start(model, offload=offload)
    documents = [[50 * at + token for token in range(30)] for at in range(12)]
    for _ in range(20):
        for _ in range(3):
            engine.submit([*engine.random.choice(documents), 999], max_tokens=engine.random.randrange(1, 9))
        engine.drain()
    blocks = engine.pool.num_gpu_blocks
    assert len(engine.device._checkpoints) <= 2 * blocks
    assert len(engine.device._recent) <= 64 * blocks
    assert engine.cache.statistics().remembered <= 64 * blocks


def test_a_checkpoint_that_is_hidden_for_a_moment_is_still_known_and_once(start, monkeypatch):
    """As when another request is given blocks of the same keys."""
    engine = start("full, window")
    engine.submit(PROMPT)
    engine.step()
    engine.step()
    checkpoint = engine.cache.coordinator.checkpoint_at(engine.keys(PROMPT), depth=7)
    for _ in range(9):
        assert engine.device.find_checkpoint(checkpoint) is not None
        with monkeypatch.context() as context:
            context.setattr(engine.device, "_unwritten", lambda: [checkpoint.tail[-1]])
            assert engine.device.find_checkpoint(checkpoint) is None
    assert len(engine.device._checkpoints._oldest) == 1
    engine.drain()
    order = list(engine.device.soonest_evicted())
    assert checkpoint_key(checkpoint.tail[-1]) in [key for _, key in order]
    for at, (block, _) in enumerate(order, start=1):  # also the second key of the same block
        assert [place for place in engine.device.evicted_after(block) if place not in order[:at]] == order[at:]
    monkeypatch.setattr(engine.device, "_unwritten", lambda: [checkpoint.tail[-1]])
    assert engine.device.find_checkpoint(checkpoint) is not None, "what no request has was written before"


# Going wrong


@every_model
def test_a_load_that_fails_on_one_rank_is_computed_and_not_tried_again(start, model):  # S7.24
    engine = start(model, offload="eager", ranks=2)
    said = engine.run(PROMPT)
    forget(engine, said)
    engine.ranks[1].failure_rate = 1.0
    assert engine.run(PROMPT) == said
    assert (engine.counts["loads planned"], engine.counts["loads failed"]) == (1, 1)
    engine.check_nothing_leaked()


@pytest.mark.parametrize("model", ["full", "full, window", "full, state", "full 8, full", "window"])
def test_vllm_may_take_less_than_the_host_has(start, model):
    """Up to a boundary where the request can resume, it is loaded. Otherwise all is computed, and no tokens
    are promised that nobody has."""
    engine = start(model, offload="eager")
    connector, most = engine.scheduler.connector, [0]
    ask = connector.get_num_new_matched_tokens

    def take_less(request, n0):
        tokens, is_later = ask(request, n0)
        return (min(tokens, most[0]), is_later) if tokens else (tokens, is_later)

    connector.get_num_new_matched_tokens = take_less
    for most[0] in (1, 3, 4, 8, 10, 16, 23, 24, 27):
        prompt = [1000 * most[0] + at for at in range(30)]
        said = engine.run(prompt)
        forget(engine, said)
        before = engine.counts["loads planned"], engine.counts["loads failed"]
        assert engine.run(prompt) == said
        planned, failed = engine.counts["loads planned"] - before[0], engine.counts["loads failed"] - before[1]
        assert planned == (min(most[0], last_boundary(engine, prompt)) % engine.grid == 0)
        assert failed == (not planned or model in HYBRID)
    engine.check_nothing_leaked()


@every_model
def test_a_request_is_aborted_in_every_phase(start, model):  # S7.11, S7.12, S7.13, S7.22
    engine = start(model, offload="eager", slowest=6, step_tokens=12)
    said = engine.run(PROMPT, max_tokens=8)
    forget(engine, said)
    engine.abort(engine.submit(PROMPT))  # before it is scheduled
    for steps in range(1, 14):  # while it loads, in prefill, in decode
        id = engine.submit([*PROMPT, steps, *noise(engine, 30)], max_tokens=8)
        for _ in range(steps):
            engine.step()
        if id in engine.requests:
            engine.abort(id)
        if steps % 3 == 0:
            engine.drain()
    engine.drain()
    assert engine.counts["aborts while WAITING"] > 0
    assert engine.counts["aborts while WAITING_FOR_REMOTE_KVS"] > 0
    assert engine.counts["aborts while RUNNING"] > 0
    assert engine.run(PROMPT, max_tokens=8) == said
    engine.check_nothing_leaked()


@both_modes
@every_model
def test_a_reset_while_something_is_loaded_and_stored(start, model, offload):  # S7.40, S7.41
    engine = start(model, offload=offload)
    said = engine.run(PROMPT)
    forget(engine, said)
    engine.ranks[0].pace = NEVER
    id = engine.submit(PROMPT)
    engine.submit(noise(engine, 22))
    for _ in range(8):
        engine.step()
    assert engine.requests[id].status is LOADING
    engine.reset()
    for _ in range(5):
        engine.step()
    engine.ranks[0].pace = None
    engine.drain()
    assert said in engine.finished
    assert engine.counts["loads cancelled"] == 1
    assert engine.counts["resets during a load"] == 1
    assert offload == "lazy" or engine.counts["resets during a store"] == 1
    assert engine.run(PROMPT) == said
    engine.check_nothing_leaked()


@both_modes
@every_model
def test_a_request_is_preempted_by_a_reset_and_resumed_in_the_very_next_step(start, model, offload):  # S7.16
    engine = start(model, offload=offload)
    said = start(model).run(PROMPT, max_tokens=12)
    engine.submit(PROMPT, max_tokens=12)
    for _ in range(6):
        engine.step()
    assert engine.restart_running()
    engine.drain()
    assert engine.finished == [said]
    engine.check_nothing_leaked()


def test_a_request_whose_load_was_cancelled_does_not_wait_for_itself(start):  # S7.41
    """vLLM keeps blocks free for the rest of a request that loads. After a failed load it goes on doing so, and then no
    second load of more than the other half of the device is ever begun, nor anything that waits behind it."""
    engine = start("full", offload="eager", device_blocks=46)
    prompt = list(range(100))
    said = engine.run(prompt)
    forget(engine, said)
    engine.ranks[0].pace = NEVER
    id = engine.submit(prompt)
    engine.step()
    (load,) = engine.ranks[0].copies.values()
    engine.ranks[0].pace, load.steps_left = None, 1000
    engine.reset()
    engine.submit(prompt[:84], max_tokens=1)
    while len(engine.requests) > 1:
        engine.step()
    while any(engine.on_device(prompt)):
        engine.submit(noise(engine, 30))
        for _ in range(10):
            engine.step()
    assert set(engine.requests) == {id}
    load.steps_left = 0
    engine.drain(steps=300)
    assert said in engine.finished
    engine.check_nothing_leaked()


# The checks check: each fails when there is something to find


def stored(engine: Engine, group: int) -> list[int]:
    """The host blocks of one group on the first rank."""
    return [block for block, (part, _) in engine.ranks[0].host.items() if part.patterns[0][0] == group]


@pytest.mark.parametrize(
    ("model", "group"), [(name, group) for name, groups in MODELS.items() for group in range(len(groups))]
)
def test_one_corrupted_host_block_is_noticed_in_every_group(start, model, group):
    engine = start(model, offload="eager")
    said = engine.run(PROMPT)
    block = stored(engine, group)[0]
    forget(engine, said)
    part, epoch = engine.ranks[0].host[block]
    engine.ranks[0].host[block] = Part(part.number, ("rotten",)), epoch
    with pytest.raises(AssertionError, match="loaded with wrong bytes"):
        engine.run(PROMPT)


def test_parts_of_a_piece_in_the_wrong_order_are_noticed(start):
    engine = start("full, state", offload="eager")
    said = engine.run(PROMPT)
    first, second = stored(engine, 1)[:2]
    forget(engine, said)
    host = engine.ranks[0].host
    host[first], host[second] = host[second], host[first]
    with pytest.raises(AssertionError, match="loaded with wrong bytes"):
        engine.run(PROMPT)


def test_a_state_from_another_boundary_is_noticed(start):
    engine = start("full, state", offload="eager")
    said = engine.run(PROMPT[:26])
    earlier = stored(engine, 1)
    engine.run(PROMPT)
    later = [block for block in stored(engine, 1) if block not in earlier]
    forget(engine, said, PROMPT)
    host = engine.ranks[0].host
    for here, there in zip(later, earlier, strict=True):
        host[here] = host[there]
    with pytest.raises(AssertionError, match="loaded with wrong bytes before token 28 in group 1"):
        engine.run(PROMPT)


@pytest.mark.parametrize("group", [0, 1, 2])
def test_one_corrupted_device_block_is_noticed_in_every_group(start, group):
    engine = start("full, window, state", offload="eager")
    said = engine.run(PROMPT)
    (block,) = engine.pool.get_cached_block(engine.keys(PROMPT)[6], [group])
    engine.ranks[0].device[block.block_id] = "rotten"
    with pytest.raises(AssertionError, match="reads wrong KV"):
        engine.run([*said, 1])


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_null_block_where_one_is_needed_is_noticed(start, group):
    engine = start("full, window, state", offload="eager")
    engine.submit(PROMPT)
    engine.step()
    (id,) = engine.requests
    start_at = engine.requests[id].num_computed_tokens
    engine.model._tables[id][group][(start_at - 1) // engine.model.groups[group].block] = NULL
    engine.model._check_held = lambda *args: None
    with pytest.raises(AssertionError, match="and it is null"):
        engine.step()
