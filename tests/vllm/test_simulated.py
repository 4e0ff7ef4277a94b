"""Engines of `benchmarks/vllm/vllm_simulated.py`, and the hits that `benchmarks/vllm/vllm_hits.py` finds in them."""

import importlib
import random

import pytest

BLOCK_TOKENS = 64
KINDS = ("ours-lazy", "ours-eager", "simple-lazy", "simple-eager", "offloading", "offloading-adaptive", "none")


@pytest.fixture
def module():
    """A script of benchmarks for vLLM, by its name."""
    return lambda name: importlib.import_module(f"benchmarks.vllm.{name}")


@pytest.fixture
def hits(module):
    return module("vllm_hits")


@pytest.fixture
def engine(module, hits):
    simulated = module("vllm_simulated")
    with simulated.model_folder() as folder:
        yield lambda kind, *blocks, **copies: simulated.Engine(
            hits.KINDS[kind], folder, simulated.Sizes(*blocks), **copies
        )


@pytest.fixture
def prompt(module):
    """A request of a session, with so many blocks of the trace."""
    request = module("serve_trace").Request

    def made(session: int, blocks: int):
        ids = tuple(range(1_000 * session, 1_000 * session + blocks))
        return request(at=0.0, session=str(session), ids=ids, tokens=blocks * BLOCK_TOKENS, answer=8)

    return made


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_comes_to_rest(engine, kind):
    running = engine(kind, 100, 100)
    running.submit([1] * 200, max_tokens=8)
    for _ in range(50):
        running.step()
    assert not running.scheduler.has_requests()


@pytest.mark.parametrize("copy_steps", [0, 1, 5])
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_blocks_that_have_left_the_device_are_found_on_the_host(engine, hits, prompt, kind, copy_steps):
    running = engine(kind, 60, 400, copy_steps=copy_steps)
    *_, again = hits.serve(running, [[prompt(session, 10) for session in (1, 2, 3, 1)]], BLOCK_TOKENS)
    least = 0.4 if kind == "simple-lazy" else 0.9  # it loses blocks of a device that is nearly all in use
    assert again.found.num_cached_tokens > least * again.request.tokens
    assert again.found.num_external_cached_tokens == running.worker.loaded * 16 > 0


def test_states_that_have_left_the_device_are_found_on_the_host(module, engine, hits, prompt):
    running = engine("ours-lazy", 60, 400, model=module("vllm_simulated").HYBRID)
    *_, again = hits.serve(running, [[prompt(session, 60) for session in (1, 2, 3, 4, 1)]], BLOCK_TOKENS)
    assert again.found.num_external_cached_tokens == 60 * BLOCK_TOKENS // 272 * 272


def test_vllm_alone_finds_nothing_that_has_left_the_device(engine, hits, prompt):
    *_, again = hits.serve(engine("none", 60, 0), [[prompt(session, 10) for session in (1, 2, 3, 1)]], BLOCK_TOKENS)
    assert again.found.num_cached_tokens == 0


@pytest.mark.parametrize("blocks", [150, 300, 600])
def test_one_pool_is_what_vllm_finds_on_one_device(engine, hits, prompt, blocks):
    choice = random.Random(blocks)
    requests = [prompt(int(choice.paretovariate(0.8)) % 20, choice.randrange(2, 20)) for _ in range(100)]
    asked = hits.serve(engine("none", blocks, 0), [requests], BLOCK_TOKENS)
    assert [each.request for each in asked] == requests
    found = sum(each.found.num_cached_tokens for each in asked) / sum(each.tokens for each in requests)
    assert found == pytest.approx(hits.one_pool(requests, blocks - 1, BLOCK_TOKENS), abs=0.01)
    assert abs(found - hits.one_pool(requests, blocks // 2, BLOCK_TOKENS)) > 0.05
