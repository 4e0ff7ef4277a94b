"""Continuous batching with host memory behind its cache, beside the same engine with a cache that holds everything.

The device has room for two prompts with their answers. Tokens are equal, and the log-probabilities of the tokens within
1e-3; in the controls a block is damaged while it is loaded, and they are not.
"""

import random
import time
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger

from connector.transformers.continuous import Blocks, ContinuousPrefixCache
from cpu_prefix_cache import OFFLOAD_MODES, ConfigurationError
from cpu_prefix_cache.testing import CorruptingCopier, FailingCopier
from random_models import VOCABULARY, build_family
from tests.connector.running import DEVICE as ON
from tests.connector.running import HIDDEN
from tests.support.host_options import with_options
from tests.support.troubled_copiers import FailingLoads

PAGE = 16
TOLERANCE = 1e-3  # of a log-probability. Measured 1e-4, and 1 in the controls
NEW_TOKENS = 20
DEVICE, ALL = 20, 1000  # blocks
SECONDS = 60

modes = pytest.mark.parametrize("mode", OFFLOAD_MODES)


@cache
def model(family="llama", seed=0):
    torch.set_num_threads(1)
    return build_family(family, hidden=HIDDEN, layers=2, window=32, seed=seed).to(ON)


def document(seed, length=100):
    draw = random.Random(seed)
    return [draw.randrange(1, VOCABULARY) for _ in range(length)]


def documents(number):
    return [document(seed) for seed in range(number)]


def generation(answers=1):
    """Greedy, also where transformers wants several answers to be samples."""
    several = dict(do_sample=True, top_k=1, num_return_sequences=answers) if answers > 1 else dict(do_sample=False)
    return GenerationConfig(max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0, **several)


def batching(blocks, **options):
    return ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=blocks, max_batch_tokens=64, return_logprobs=True, **options
    )


def alone(of, prompts, answers=1):
    """The outputs of an engine whose cache holds everything."""
    of.destroy_cached_continuous_batching_manager()
    settings = dict(generation_config=generation(answers), continuous_batching_config=batching(ALL))
    return list(of.generate_batch(prompts, **settings).values())


def new_manager(of, answers=1, **options):
    of.destroy_cached_continuous_batching_manager()
    return of.init_continuous_batching(generation(answers), continuous_batching_config=batching(DEVICE, **options))


class Server:
    """An engine that takes requests at any time."""

    def __init__(self, manager, answers, **options):
        self.manager, self.answers = manager, answers
        options = {"host_bytes": "4MiB", "strict": True, **options}
        self.cache = ContinuousPrefixCache(manager, **with_options(**options))

    def results(self, ids):
        """The outputs of these requests, by their ids."""
        outputs, deadline = {}, time.monotonic() + SECONDS
        while len(outputs) < len(ids) * self.answers and time.monotonic() < deadline and self.manager.is_running():
            if (output := self.manager.get_result(timeout=1)) is not None and output.request_id.split("__")[0] in ids:
                outputs[output.request_id] = output
        assert len(outputs) == len(ids) * self.answers
        return outputs

    def ask(self, prompt, **options):
        return list(self.results({self.manager.add_request(prompt, **options)}).values())

    def ask_each(self, prompts):
        """One after the other."""
        return [output for prompt in prompts for output in self.ask(prompt)]

    @property
    def hit_tokens(self):
        return self.cache.host.statistics().cache.hit_tokens

    def check_at_rest(self):
        """No block is lost or in use, nothing runs, and only what is on the device has a key there."""
        allocator, pool, host = self.cache._allocator, self.cache._cache.pool, self.cache.host.statistics()
        free = pool.count_free_blocks(allocator.index) + pool.num_free_sectors * allocator.blocks_per_sector
        assert free + len(allocator.ledger.cached_blocks) == allocator.num_blocks
        assert not allocator.ledger.shared_ref_counts
        named = {name for name in self.cache._blocks.names if isinstance(name, int)}
        assert named <= allocator.ledger.hash_to_block.keys()
        self.cache.host.cache.check_valid()
        assert (host.cache.running, host.reported_not_on_device, host.unknown_request) == (0, 0, 0)


@contextmanager
def serving(of, answers=1, **options):
    server = Server(new_manager(of, answers), answers, **options)
    with server.cache:
        server.manager.start()
        try:
            yield server
        finally:
            server.manager.stop(keep_for_next_session=True)
        server.check_at_rest()


def differ(output, reference):
    """Whether they do, in a token or in how likely one was."""
    assert output.error is None and len(reference.generated_tokens) == NEW_TOKENS
    far = (abs(a - b) > TOLERANCE for a, b in zip(output.logprobs, reference.logprobs, strict=True))
    return output.generated_tokens != reference.generated_tokens or any(far)


@pytest.mark.parametrize(("family", "mode"), [("llama", "lazy"), ("qwen3", "eager")])
def test_a_prompt_that_has_left_the_device_comes_back_from_the_host(family, mode):
    prompts = documents(5)
    references = alone(model(family), prompts)
    with serving(model(family), offload=mode) as server:
        for rounds in range(3):
            assert not any(map(differ, server.ask_each(prompts), references))
            assert server.hit_tokens == rounds * 5 * 96  # all whole blocks of each prompt


def test_control_a_damaged_block_shows():
    prompts = documents(5)
    references = alone(model(), prompts)
    with serving(model(), wrap_copier=CorruptingCopier) as server:
        assert not any(map(differ, server.ask_each(prompts), references))
        assert any(map(differ, server.ask_each(prompts), references))


def test_generate_batch_takes_what_earlier_batches_left():
    of, prompts = model(), documents(5)
    references = alone(of, prompts)
    with ContinuousPrefixCache(new_manager(of), host_bytes="4MiB") as cache:
        for _ in range(2):
            outputs = of.generate_batch(prompts, persistent_manager=True).values()
            assert not any(map(differ, outputs, references))
    assert cache.host.statistics().cache.hit_tokens > 5 * 48
    assert not any(map(differ, of.generate_batch(prompts, persistent_manager=True).values(), references))  # without


def test_an_answer_is_kept_with_its_prompt():
    prompts = documents(5)
    with serving(model()) as server:
        answers = [output.generated_tokens for output in server.ask_each(prompts)]
        talk = prompts[0] + answers[0] + document(9, length=7)
        [output] = server.ask(talk)
        assert server.hit_tokens == 112  # 100 of the prompt, and 12 of its answer
    assert not differ(output, *alone(model(), [talk]))


def test_the_host_has_the_rest_of_a_prompt_that_begins_on_the_device():
    prompts = documents(4)
    with serving(model()) as server:
        server.ask_each(prompts)
        server.ask(prompts[0][:60])
        assert server.hit_tokens == 48
        [output] = server.ask(prompts[0])
        assert server.hit_tokens == 48 + (96 - 48)
    assert not differ(output, *alone(model(), prompts[:1]))


@modes
def test_a_hit_takes_the_room_of_blocks_that_wait_and_they_are_kept(mode):
    prompt, *others = document(7, length=200), *documents(2)
    with serving(model(), offload=mode) as server:
        server.ask_each([prompt, *others])  # then two thirds of the device wait
        [output] = server.ask(prompt)
        assert server.hit_tokens == 192
        server.ask(others[1])
        assert server.hit_tokens == 192 + 96
    assert not differ(output, *alone(model(), [prompt]))


def test_blocks_that_leave_while_another_answers():
    prompt, other = documents(2)
    with serving(model()) as server:
        server.ask(prompt)
        server.ask(other, max_new_tokens=180)  # of the 320 tokens that the device has room for
        [output] = server.ask(prompt)
        assert server.hit_tokens == 96
    assert not differ(output, *alone(model(), [prompt]))


def crowd(draw):
    """Prompts of which many begin alike, each with its answer at most a third of the device."""
    beginnings = [document(seed, draw.randrange(20, 80)) for seed in range(6)]
    return [draw.choice(beginnings) + document(at, draw.randrange(1, 10)) for at in range(30)]


@pytest.mark.parametrize(
    ("seed", "copier", "mode"),
    [(0, None, "lazy"), (1, None, "eager"), (1, FailingCopier, "lazy"), (0, FailingCopier, "eager")],  # every pair
)
def test_requests_that_crowd_the_device_are_preempted_and_cancelled(seed, copier, mode, monkeypatch):
    draw = random.Random(seed)
    prompts = crowd(draw)
    references = alone(model(), prompts)
    with serving(model(), offload=mode, wrap_copier=copier) as server:
        end, preempted = server.cache._end, []
        monkeypatch.setitem(
            vars(server.cache._cache),
            "free_blocks",
            lambda id, no_cache=False: (preempted.append(no_cache), end(id, no_cache)),
        )
        for _ in range(2):
            ids = [server.manager.add_request(prompt) for prompt in prompts]
            cancelled = set(draw.sample(range(len(prompts)), 5))
            for at in cancelled:
                server.manager.cancel_request(ids[at])
            outputs = server.results({id for at, id in enumerate(ids) if at not in cancelled})
            assert not [at for at, id in enumerate(ids) if id in outputs and differ(outputs[id], references[at])]
        assert any(preempted) and server.hit_tokens


def test_control_a_crowd_with_damaged_blocks_shows():
    prompts = crowd(random.Random(0))
    references = alone(model(), prompts)
    with serving(model(), wrap_copier=lambda *given: CorruptingCopier(*given, loads=None)) as server:
        ids = [server.manager.add_request(prompt) for prompt in prompts]
        outputs = server.results(set(ids))
    assert any(differ(outputs[id], reference) for id, reference in zip(ids, references, strict=True))


def test_several_answers_to_a_prompt():
    prompts = [document(seed, length=50) for seed in range(5)]
    references = alone(model(), prompts, answers=2)
    with serving(model(), answers=2) as server:
        for _ in range(2):
            assert not any(map(differ, server.ask_each(prompts), references))
        assert server.hit_tokens


def test_after_a_failed_load_the_prompt_is_computed():
    prompts = documents(5)
    references = alone(model(), prompts)
    with serving(model(), wrap_copier=FailingLoads) as server:
        for _ in range(2):
            assert not any(map(differ, server.ask_each(prompts), references))
        assert server.cache.host.statistics().cache.loads_failed


@pytest.mark.parametrize("is_seen", [True, False], ids=["", "control: not looked at"])
def test_weights_that_have_changed(is_seen, monkeypatch):
    of, prompts = build_family("llama", hidden=HIDDEN, layers=2, window=32), documents(4)
    with serving(of) as server:
        server.ask_each(prompts)
        of.load_state_dict(model(seed=1).state_dict())
        if not is_seen:
            monkeypatch.setattr(server.cache._weights, "follow", lambda: None)
        again = prompts[::-1]  # the last is on the device, the first on the host
        outputs = server.ask_each(again)
    assert any(map(differ, outputs, alone(of, again))) != is_seen


def test_two_chunks_with_one_hash_are_not_taken_for_each_other():
    """The engine's hashes have 64 bits, and it may give a request the block of another chunk."""
    ledger = BlockLedger()
    blocks = Blocks(SimpleNamespace(num_blocks=4, ledger=ledger))
    ledger.register_new_hash(3, 77)
    one, other = b"1" * 16, b"2" * 16
    for key in (one, other):
        blocks.remember([3], [key])
    assert (blocks.key(3), blocks.block(one), blocks.block(other)) == (one, 3, None)
    blocks.evicted(3)
    ledger.release(3)
    ledger.evict_cached_blocks()
    ledger.register_new_hash(2, 77)
    blocks.remember([2], [other])
    assert (blocks.key(2), blocks.block(one), blocks.block(other)) == (other, None, 2)


@pytest.mark.parametrize(
    ("family", "options"),
    [("gemma3", {}), ("gpt_oss", {}), ("llama", {"allow_block_sharing": False})],
    ids=["windows", "windows and sinks", "no sharing"],
)
def test_an_engine_that_shares_no_prefixes_is_refused(family, options):
    with pytest.raises(ConfigurationError, match="HostPrefixCache"):
        ContinuousPrefixCache(new_manager(model(family), **options), host_bytes="4MiB")


def test_a_manager_that_is_refused_is_not_kept_on_its_model():
    """`generate_batch` would take it for the next batch, whatever that one is given."""
    of = build_family("llama", hidden=HIDDEN, layers=2, window=32)
    with pytest.raises(ConfigurationError, match="HostPrefixCache"):
        ContinuousPrefixCache(new_manager(of, allow_block_sharing=False), host_bytes="4MiB")
    assert "_cached_continuous_batching_manager" not in vars(of)
    with ContinuousPrefixCache(new_manager(of), host_bytes="4MiB"):
        assert "_cached_continuous_batching_manager" in vars(of)


def test_a_second_cache_on_one_manager_is_refused():
    """To close one would end the other."""
    manager = new_manager(model())
    refused = pytest.raises(ConfigurationError, match="has host memory already")
    with ContinuousPrefixCache(manager, host_bytes="4MiB"), refused:
        ContinuousPrefixCache(manager, host_bytes="4MiB")
    ContinuousPrefixCache(manager, host_bytes="4MiB").close()
