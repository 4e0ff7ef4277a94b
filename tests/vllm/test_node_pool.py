"""vLLM on the pool of a keeper: refusals, one engine after another, and servers side by side."""

import os
import pickle
from dataclasses import replace

import pytest
import torch
from vllm.config import KVEventsConfig, MultiModalConfig, ParallelConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.vllm.rank_pool import PoolHere
from connector.vllm.settings import Settings
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.keeper import questions, takes
from tests.stores.servers import starting
from tests.support.threads import wait_until
from tests.vllm import servers
from tests.vllm.engine import drafting, full, latent, one_group, state, vllm_config, window
from tests.vllm.real_cache import BLOCKS, GROUPS, PROMPTS, CachedEngine, Copies, expected_of, folder_of
from tests.vllm.real_engine import BLOCK, PATIENCE, TOLERANCE, differences
from tests.vllm.servers import ALIKE, START_SECONDS, NodeKeeper, VllmServer, difference

POOL_BYTES = 2**25
HITS = "cpu_prefix_cache_hit_tokens_total"
ADDRESS = "unix:/run/kv/kv.sock"


@pytest.fixture
def begin(tmp_path):
    with starting(tmp_path) as begin:
        yield begin


# What is refused


def settings_of(folder, groups=(), pool=ADDRESS, change=lambda config: None, **options):
    config = vllm_config(folder, **{"pool": pool, **options})
    change(config)
    return Settings.of(config, KVCacheConfig(48, [], list(groups)) if groups else one_group(48))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cpu_bytes_to_use": 2**30}, "with a pool there is no cpu_bytes_to_use"),
        ({"tier": "file:/nvme/kv:1TiB"}, "with a pool there is no tier"),
        ({"store_after": 2}, "with a pool there is no store_after"),
        ({"checkpoint_interval": 32}, "with a pool there is no checkpoint_interval"),
        ({"policy": "arc"}, "with a pool policy must be 'lru'; got 'arc'"),
        ({"offload": "lazy"}, "with a pool offload must be 'eager'; got 'lazy'"),
        ({"pool": "/run/kv/kv.sock"}, "a pool is at unix:/PATH"),
        ({"pool": 7}, "a pool is a text such as unix:/run/kv/kv.sock"),
        ({"pool": {"revision": "1"}}, "or a dictionary with address"),
        ({"pool": {"address": ADDRESS, "size": 5}}, "unknown key 'size' in a pool; known keys are address, model"),
        ({"pool": {"address": ADDRESS, "revision": "1", "revision_file": "/run/it"}}, "leave one of them out"),
    ],
)
def test_an_option_that_the_keeper_decides_is_refused(tmp_path, options, words):
    with pytest.raises(ConfigurationError, match=words):
        settings_of(tmp_path, **options)


@pytest.mark.parametrize("groups", [[window(32)], [state()]])
def test_a_model_that_a_keeper_does_not_take_is_refused(tmp_path, groups):
    with pytest.raises(ConfigurationError, match="with some full attention"):
        settings_of(tmp_path, groups)


def set_hash(config):
    config.cache_config.prefix_caching_hash_algo = "xxhash"


def set_events(config):
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_hash, "a pool needs cryptographic keys"),
        (set_events, "publishes no KV events"),
    ],
)
def test_an_engine_that_cannot_share_is_refused(tmp_path, change, words):
    for group in full(), latent():
        with pytest.raises(ConfigurationError, match=words):
            settings_of(tmp_path, [group], change=change, pool={"address": ADDRESS, "revision": "1"})


def set_drafter(config):
    config.speculative_config = drafting("eagle")


def test_a_drafter_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="knows no drafter"):
        settings_of(tmp_path, change=set_drafter)


def test_weights_that_nothing_identifies_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="give the pool a revision"):
        settings_of(tmp_path)


def test_engines_of_other_weights_have_other_names(tmp_path):
    pools = [settings_of(tmp_path, pool={"address": ADDRESS, "revision": each}).pool for each in "112"]
    one, same, other = (each.namespace.digest for each in pools)
    assert one == same != other


def test_engines_of_other_lengths_have_other_names(tmp_path):
    """No pool was there before lengths were counted, so all models have theirs in the name."""

    def of(length):
        def change(config):
            config.model_config.max_model_len = length

        return settings_of(tmp_path, pool={"address": ADDRESS, "revision": "1"}, change=change).pool.namespace.digest

    assert of(32) == of(32) != of(64)


def test_engines_that_read_images_otherwise_have_other_names(tmp_path):
    def of(**fields):
        def change(config):
            config.model_config.multimodal_config = MultiModalConfig(**fields)

        return settings_of(tmp_path, pool={"address": ADDRESS, "revision": "1"}, change=change).pool.namespace.digest

    one, same, other = (of(mm_processor_kwargs={"max_pixels": pixels}) for pixels in (1, 1, 2))
    assert one == same != other


def test_engines_that_somebody_gave_one_id_do_not_meet(tmp_path):
    """Each takes the seat of its own worker, which has its configuration, sent from process to process."""

    def config():
        made = vllm_config(tmp_path, pool={"address": ADDRESS, "revision": "1"})
        made.kv_transfer_config.engine_id = "by hand"
        return made

    one, other = config(), config()
    sent = pickle.loads(pickle.dumps(one))
    meetings = [Settings.of(each, one_group(48)).pool.meeting for each in (one, sent, other)]
    assert meetings[0] == meetings[1] != meetings[2]


def test_engines_whose_rows_lie_in_another_order_have_other_names(tmp_path, begin):
    settings = settings_of(tmp_path, pool={"address": begin(NodeKeeper, POOL_BYTES).address, "revision": "1"})
    names = []
    for number, order in enumerate(["KV", "VK", "KV"]):
        pool = replace(settings.pool, meeting=f"cpc-test-{os.getpid()}-{number}")
        here = PoolHere(pool, ParallelConfig(), settings.planner.host_block_bytes, order, torch.device("cpu"))
        messenger = settings.pool.pool.taken(pool.meeting).messenger(settings.planner)
        names.append(messenger._namespace)
        messenger.close()
        here.close()
    assert names[0] == names[2] != names[1]


# One engine after another, in this process


@pytest.fixture
def patience(monkeypatch):
    """A keeper on a busy machine answers late, and these tests want its answers."""
    monkeypatch.setattr(questions, "ASK_SECONDS", PATIENCE)
    monkeypatch.setattr(takes, "TAKE_SECONDS", PATIENCE)


def engine_on(keeper, copies=None, dtype="float32", model="llama", **options):
    extra = {"pool": {"address": keeper.address, "revision": "1"}, "reset": "with_connector", **options}
    return CachedEngine(folder_of(model), copies=copies, engine={"extra": extra, "dtype": dtype})


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_the_next_engine_loads_what_one_has_computed(begin, patience, model):
    expected, keeper = expected_of(model), begin(NodeKeeper, POOL_BYTES)
    with engine_on(keeper, model=model) as engine:
        computed = engine.answer(PROMPTS[:3])
        engine.rest()
        engine.forget()
        again = engine.answer(PROMPTS[:1])
    assert max(differences(computed + again, expected[:3] + expected[:1])) <= TOLERANCE
    assert len(keeper.committed()) == 3 * BLOCKS
    with engine_on(keeper, model=model) as engine:
        loaded = engine.answer(PROMPTS[:4])
        engine.rest()
        assert engine.statistics.chunks_stored == BLOCKS
    assert max(differences(loaded, expected[:4])) <= TOLERANCE
    assert [each.loaded_tokens for each in [*again, *loaded]] == [BLOCKS * BLOCK] * 4 + [0]


@pytest.mark.parametrize(
    ("model", "group"), [(model, group) for model in ("llama", "gemma3") for group in GROUPS[model]]
)
def test_one_damaged_block_shows(begin, patience, model, group):
    expected, keeper = expected_of(model), begin(NodeKeeper, POOL_BYTES)
    with engine_on(keeper, Copies(damaged=group), model=model) as engine:
        engine.answer(PROMPTS[:2])
        engine.rest()
        engine.forget()
        damaged = engine.answer(PROMPTS[:2])
    assert min(differences(damaged, expected[:2])) > TOLERANCE


def test_coded_blocks_come_back_as_raw_ones_do(patience, tmp_path):
    answers = []
    for codec in "none", "exponent":
        (folder := tmp_path / codec).mkdir()
        with starting(folder) as begin_one:
            keeper = begin_one(NodeKeeper, POOL_BYTES)
            with engine_on(keeper, dtype="bfloat16", **({} if codec == "none" else {"codec": codec})) as engine:
                engine.answer(PROMPTS[:2])
                engine.rest()
                engine.forget()
                answers.append(engine.answer(PROMPTS[:2]))
                assert engine.statistics.store_unfit == 0
    assert [each.loaded_tokens for each in answers[0] + answers[1]] == [BLOCKS * BLOCK] * 4
    assert max(differences(*answers)) <= TOLERANCE


def test_weights_that_have_changed_find_nothing(begin, patience, tmp_path):
    keeper, file = begin(NodeKeeper, POOL_BYTES), tmp_path / "revision"
    file.write_text("1")
    with engine_on(keeper, pool={"address": keeper.address, "revision_file": str(file)}) as engine:
        engine.answer(PROMPTS[:1])
        engine.rest()
        file.write_text("2")
        engine.forget(host=True)
        assert engine.answer(PROMPTS[:1])[0].loaded_tokens == 0
        engine.rest()
        file.write_text("1")
        engine.forget(host=True)
        assert engine.answer(PROMPTS[:1])[0].loaded_tokens == BLOCKS * BLOCK


# Servers side by side


def share(begin, count, model="llama", *more):
    """Each of so many servers loads what each other one has computed. All answers are those without a cache. `more` is
    of their command line.
    """
    expected = expected_of(model)[:count]
    keeper = begin(NodeKeeper, POOL_BYTES)
    folder, extra = folder_of(model), {"pool": {"address": keeper.address, "connect_seconds": START_SECONDS}}
    servers = [begin(VllmServer, folder, extra, *more) for _ in range(count)]
    wait_until(lambda: all(server.is_up() for server in servers), START_SECONDS)
    computed = []
    for at, prompt in enumerate(PROMPTS[:count]):
        computed.append(servers[at].logprobs(prompt))
        assert far_from(computed[at], expected[at]) < ALIKE
        wait_until(lambda at=at: len(keeper.committed()) == (at + 1) * BLOCKS, PATIENCE)
    for at, server in enumerate(servers):
        others = [each for each in range(count) if each != at]
        loaded = [server.logprobs(PROMPTS[each]) for each in others]
        assert server.metric(HITS) == len(others) * BLOCKS * BLOCK
        assert max(far_from(got, expected[each]) for each, got in zip(others, loaded, strict=True)) < ALIKE
    return keeper, servers


def far_from(answer, expected):
    """The largest difference of a server's logprobs from those of an engine that computes all, of the same tokens."""
    return max(
        abs(logprob - float(row[int(token.rpartition(":")[2])]))
        for most_likely, row in zip(answer, expected.logprobs, strict=True)
        for token, logprob in most_likely.items()
    )


def check_damage_shows(keeper, first, second, prompt):
    before = set(keeper.committed())
    computed = first.logprobs(prompt)
    wait_until(lambda: len(keeper.committed()) == len(before) + BLOCKS, PATIENCE)
    keeper.damage(next(slot for slot in keeper.committed() if slot not in before))
    hits = second.metric(HITS)
    damaged = second.logprobs(prompt)
    assert second.metric(HITS) == hits + BLOCKS * BLOCK
    assert difference(computed, damaged) > ALIKE


@pytest.mark.server
@pytest.mark.parametrize("model", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_two_servers_load_what_the_other_one_has_computed(begin, model):
    keeper, servers = share(begin, 2, model, "--max-model-len", "512")
    check_damage_shows(keeper, *servers, PROMPTS[5])


@pytest.mark.slow
@pytest.mark.server
def test_four_servers_load_what_the_others_have_computed(begin):
    keeper, servers = share(begin, 4)
    check_damage_shows(keeper, servers[3], servers[0], PROMPTS[5])


@pytest.mark.slow
@pytest.mark.server
def test_a_server_of_two_ranks_loads_what_one_before_has_computed(begin, monkeypatch):
    """One after the other: each is four processes."""
    monkeypatch.setitem(servers.ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND", "0|0")  # vLLM asks for a node for each rank
    expected, keeper = expected_of("llama"), begin(NodeKeeper, POOL_BYTES)
    extra = {"pool": {"address": keeper.address, "connect_seconds": START_SECONDS}}

    def server_of_two_ranks():
        server = begin(VllmServer, folder_of("llama"), extra, "--tensor-parallel-size", "2")
        wait_until(server.is_up, START_SECONDS)
        return server

    first = server_of_two_ranks()
    for number in range(3):
        assert far_from(first.logprobs(PROMPTS[number]), expected[number]) < ALIKE
        wait_until(lambda number=number: len(keeper.committed()) == (number + 1) * BLOCKS, PATIENCE)
    first.kill()
    last = keeper.committed()[-1]
    second = server_of_two_ranks()
    assert max(far_from(second.logprobs(PROMPTS[number]), expected[number]) for number in range(2)) < ALIKE
    assert second.metric(HITS) == 2 * BLOCKS * BLOCK
    keeper.damage(last, lane=1, lanes=2)
    assert far_from(second.logprobs(PROMPTS[2]), expected[2]) > ALIKE
    assert second.metric(HITS) == 3 * BLOCKS * BLOCK


@pytest.mark.slow
@pytest.mark.server
def test_the_engines_of_data_parallelism_load_what_the_other_one_has_computed(begin):
    expected, keeper = expected_of("llama"), begin(NodeKeeper, POOL_BYTES)
    extra = {"pool": {"address": keeper.address, "connect_seconds": START_SECONDS}}
    server = begin(VllmServer, folder_of("llama"), extra, "--data-parallel-size", "2")
    wait_until(server.is_up, START_SECONDS)
    for number in range(2):
        server.logprobs(PROMPTS[number], **{"X-data-parallel-rank": str(number)})
        wait_until(lambda number=number: len(keeper.committed()) == (number + 1) * BLOCKS, PATIENCE)
    for number in range(2):
        answer = server.logprobs(PROMPTS[1 - number], **{"X-data-parallel-rank": str(number)})
        assert far_from(answer, expected[1 - number]) < ALIKE
    assert server.metric(HITS) == 2 * BLOCKS * BLOCK
