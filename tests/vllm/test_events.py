"""A router's picture of the host: exactly the prefixes that could be hit there, at every moment."""

import msgspec
import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import hash_block_tokens
from vllm.v1.request import Request

from connector.vllm.contents import UNKNOWN, KnownContents
from cpu_prefix_cache.model.hashing import checkpoint_key
from tests.vllm import engine as engines
from tests.vllm.engine import BLOCK, Engine, full, one_group, state, vllm_config, window
from tests.vllm.test_metrics import OURS, SILENT, multi_config
from tests.vllm.test_stress import live_through

PROMPT = list(range(30))  # 7 full blocks and 2 tokens
# Fields that Dynamo's and llm-d's routers decode, or pass over. An `ownership` that Dynamo does not know makes it drop
# the event; a `group_idx` makes both take the event for one group's.
READ_BY_ROUTERS = {
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "lora_name",
    "extra_keys",
    "medium",
    "locality",
}


def hash_of(event, **changed):
    """The hash of a stored block, from its event alone, or with something changed."""
    given = {"tokens": event.token_ids, "extra_keys": event.extra_keys[0]} | changed
    assert event.block_size == len(event.token_ids) and len(event.extra_keys) == 1
    return hash_block_tokens(sha256, event.parent_block_hash, given["tokens"], given["extra_keys"])


class Router:
    """A subscriber of vLLM's KV events, which knows nothing else."""

    def __init__(self):
        self.on_host, self.in_tier = {}, {}  # the hash of a boundary -> that of the block before
        self.heard = 0

    def publish(self, batch):
        for event in batch.events:
            if not isinstance(event, AllBlocksCleared) and event.medium != "GPU":
                self.hear(event)

    def hear(self, event):
        self.heard += 1
        assert event.block_hashes and event.locality == "LOCAL"
        known = {"CPU": self.on_host, "STORAGE": self.in_tier}[event.medium]
        if isinstance(event, BlockRemoved):
            for each in event.block_hashes:
                del known[each]
            return
        [each] = event.block_hashes
        assert each not in known, "stored twice"
        assert each == hash_of(event), "a router that hashes tokens itself would look for another block"
        known[each] = event.parent_block_hash

    def shutdown(self):
        pass


@pytest.fixture(autouse=True)
def hashes_as_they_are(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")  # or vLLM makes 64-bit numbers of them


@pytest.fixture
def start(tmp_path, monkeypatch):
    """An engine at rest with KV events, a router that listens to it, and host memory that is ready."""

    def config(*args, **options):
        made = vllm_config(*args, **options)
        made.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        return made

    def start(**options):
        engine = Engine(tmp_path, **{"host_blocks": 200, "offload": "eager", **options})
        engine.scheduler.kv_event_publisher = engine.router = Router()
        while engine.cache.pool.statistics().ready < engine.cache.pool.capacity:
            engine.step()
        return engine

    monkeypatch.setattr(engines, "vllm_config", config)
    return start


def can_be_hit(cache):
    """Chunks of a cache's pool that a request could resume after, one by one."""
    pool = cache.pool
    nodes = [node for node in range(len(pool._forest.key)) if pool.key(node) and node not in pool.checkpoints]
    return {
        pool.key(node)
        for node in nodes
        if not cache.planner.needs_checkpoint(pool.depth(node)) or pool.find(checkpoint_key(pool.key(node))) is not None
    }


def check_against_lookups(engine, chains):
    """A request that ends one token after a boundary, and whose device has all before the last block, is given that
    block if, and only if, the router knows of it.
    """
    for keys in chains:
        for depth in range(1, len(keys) + 1):
            on_device = (depth - 1) * BLOCK
            found = engine.cache.coordinator.longest_boundary(keys[:depth], on_device, depth * BLOCK + 1)
            assert (found == depth * BLOCK) == (keys[depth - 1] in engine.router.on_host)


def check_at_every_step(engine):
    update, chains = engine.scheduler.update_from_output, {}

    def checked(*args):
        result = update(*args)
        assert set(engine.router.on_host) == can_be_hit(engine.cache)
        assert set(engine.router.in_tier) == (set() if engine.below is None else can_be_hit(engine.below))
        for id, request in engine.requests.items():
            chains[id] = list(request.block_hashes)
            for at, key in enumerate(chains[id]):
                above = chains[id][at - 1] if at else None
                assert engine.router.on_host.get(key, above) == above, "a boundary hangs below another one"
        engine.counts["most on the host"] = max(engine.counts["most on the host"], len(engine.router.on_host))
        engine.counts["checks"] += 1
        if engine.counts["checks"] % 25 == 0:
            check_against_lookups(engine, list(chains.values())[-40:])
        return result

    engine.scheduler.update_from_output = checked


MODELS = {"full": None, "full, state": [full(), state()], "full, window": [full(), window(9)], "state": [state()]}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("offload", "ranks"), [("lazy", 1), ("eager", 2)])
def test_a_router_knows_what_can_be_hit_at_every_step(start, model, offload, ranks):
    engine = start(
        groups=MODELS[model],
        offload=offload,
        ranks=ranks,
        host_blocks=24 if model == "state" else 160,  # of a block each
        failure_rate=0.03,
        device_blocks=64,
        seed=7,
    )
    check_at_every_step(engine)
    live_through(engine, requests=500)
    assert engine.router.heard > 100
    assert engine.counts["most on the host"] >= 8
    assert engine.counts["resets"] and engine.cache.statistics().pool.evictions and not engine.cache.is_off
    assert engine.counts["loads failed"] or model == "state", "few loads, of one page each"


@pytest.mark.parametrize("model", ["full", "full, window"])
@pytest.mark.parametrize("below", ["lazy", "eager"])
def test_a_router_knows_what_a_tier_has(start, model, below):
    """Also where it was promoted for a request that nobody has computed, and written long after its request."""
    engine = start(
        groups=MODELS[model],
        device_blocks=48,
        host_blocks=100,
        tier={"offload": below},
        tier_slots=200,
        tier_faults=dict(failure_rate=0.02, refusal_rate=0.02, slowest=12),
        failure_rate=0.03,
        seed=3,
    )
    check_at_every_step(engine)
    live_through(engine, requests=900)
    statistics = engine.half.tier.tier_statistics()
    assert statistics.hit_tokens and statistics.refused and statistics.cache.pool.evictions and engine.router.in_tier


# One by one


def test_a_prompt_is_announced_when_its_store_has_landed(start):
    engine = start(slowest=1)
    heard = []
    engine.router.hear = heard.append
    request = engine.requests[engine.submit(PROMPT, max_tokens=1)]
    engine.drain()
    assert {type(event) for event in heard} == {BlockStored}
    assert [event.block_hashes for event in heard] == [[each] for each in request.block_hashes[:7]]
    assert [event.parent_block_hash for event in heard] == [None, *request.block_hashes[:6]]
    request = engine.requests[engine.submit([*PROMPT, 1, 2, 3], max_tokens=1)]
    engine.drain()
    [*_, event] = heard
    assert event.block_hashes == [request.block_hashes[7]] and event.parent_block_hash == request.block_hashes[6]


def test_without_one_token_a_router_would_hash_another_block(start):
    """The control of what a Router asserts of each event."""
    engine = start()
    heard = []
    engine.router.hear = heard.append
    engine.run(PROMPT)
    for event in heard[:7]:
        wrong = [*event.token_ids[:-1], event.token_ids[-1] + 1]
        assert hash_of(event) == event.block_hashes[0] != hash_of(event, tokens=wrong)
        assert hash_of(event, extra_keys=("pirate",)) != event.block_hashes[0]


def say(engine, salt=None, lora=None, image=None):
    """Hand the engine a prompt whose hashes have more in them than tokens, and let it come to rest."""
    images = image and [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=image, mm_position=PlaceholderRange(offset=6, length=9)
        )
    ]
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
    engine.scheduler.max_num_encoder_input_tokens = 1000
    request = Request(
        f"said {engine.counts['submitted']}",
        list(PROMPT),
        SamplingParams(max_tokens=1, ignore_eos=True),
        None,
        mm_features=images,
        lora_request=lora,
        cache_salt=salt,
        block_hasher=engine._hasher,
    )
    engine.counts["submitted"] += 1
    engine.requests[request.request_id] = request
    engine.model.begin(request)
    engine.scheduler.add_request(request)
    engine.drain()
    return request


def test_all_that_is_in_a_hash_is_in_the_event_as_vllm_itself_has_it(start):
    engine = start()
    seen = {"CPU": {}, "GPU": {}}

    def publish(batch):
        for event in batch.events:
            assert len(event.block_hashes) == len(event.extra_keys)
            for at, (each, keys) in enumerate(zip(event.block_hashes, event.extra_keys, strict=True)):
                tokens = event.token_ids[at * BLOCK : (at + 1) * BLOCK]
                seen[event.medium][each] = tokens, keys, event.block_size, event.lora_id, event.lora_name

    engine.router.publish = publish
    request = say(engine, salt="tenant 7", lora=LoRARequest("pirate", 3, "/pirate"), image="a cat")
    assert len(seen["CPU"]) == 7 and seen["CPU"].items() <= seen["GPU"].items()
    first, second, third = (seen["CPU"][key] for key in request.block_hashes[:3])
    assert first == (PROMPT[:BLOCK], ("pirate", "tenant 7"), BLOCK, 3, "pirate")
    assert second[1] == ("pirate", ("a cat", 2)) and third[1] == ("pirate", ("a cat", -2))
    plain = say(engine)
    assert [seen["CPU"][key][1:] for key in plain.block_hashes[:7]] == [(None, BLOCK, None, None)] * 7


def test_tokens_are_kept_until_the_store_has_ended_however_late_that_is(start):
    engine = start(offload="lazy", device_blocks=24, slowest=1)
    contents = engine.half._events.contents
    for first in range(0, 6000, 100):
        engine.run([first + each for each in PROMPT], max_tokens=1)
    assert engine.router.heard > 400  # each with its tokens: see `hear`
    assert 180 < len(contents) < 2 * (24 + 200), "what device and host have lost is forgotten"


def test_a_chunk_is_kept_while_one_of_its_requests_waits(start):
    """Neither device nor host has it yet. Of two requests with one beginning the later one ends first."""
    engine = start()
    contents = KnownContents(BLOCK, 1, lambda keys: [False] * len(keys))

    def note(name, tokens):
        request = Request(name, tokens, SamplingParams(max_tokens=1), None, block_hasher=engine._hasher)
        contents.note(request)
        return request.block_hashes

    def others_come_and_go():
        for number in range(100):
            note("other", [number + 1000 + each for each in PROMPT])
            contents.ended("other")
            contents.forget()

    waits = note("waits", PROMPT)
    note("ends", [*PROMPT, *PROMPT])
    contents.ended("ends")
    others_come_and_go()
    tokens = [each for portion, at in contents.of(waits) for each in portion.tokens[at * BLOCK : at * BLOCK + BLOCK]]
    assert tokens == PROMPT[: 7 * BLOCK]
    contents.ended("waits")
    others_come_and_go()
    assert {*contents.of(waits)} == {UNKNOWN}


def test_a_reset_is_announced_block_by_block_and_only_for_the_host(start):
    """AllBlocksCleared would make a router forget the device too: S7.48."""
    engine = start()
    engine.run(PROMPT)
    stored = set(engine.router.on_host)
    assert len(stored) >= 7
    engine.scheduler.connector.reset_cache()
    told = engine.scheduler.connector.take_events()
    assert {type(event) for event in told} == {BlockRemoved}
    assert {each for event in told for each in event.block_hashes} == stored
    assert engine.scheduler.connector.take_events() == []


def test_a_model_with_states_announces_the_boundary_that_has_one(start):
    engine = start(groups=[full(), state()])
    request = engine.requests[engine.submit(PROMPT, max_tokens=1)]
    engine.drain()
    assert engine.cache.pool.resident_run(request.block_hashes, 0, 7) == 7
    assert engine.router.on_host == {request.block_hashes[6]: request.block_hashes[5]}


def test_hashes_look_as_those_of_vllm_itself(start, monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")  # the default
    engine = start()
    seen = {"CPU": {}, "GPU": {}}

    def publish(batch):
        for event in batch.events:
            if isinstance(event, BlockStored):
                above = event.parent_block_hash
                for each in event.block_hashes:
                    seen[event.medium][each], above = above, each

    engine.router.publish = publish
    engine.run(PROMPT)
    assert len(seen["CPU"]) >= 7 and all(type(each) is int for each in seen["CPU"])
    assert seen["CPU"].items() <= seen["GPU"].items()


def test_events_that_nobody_publishes_are_not_kept(tmp_path):
    engine = Engine(tmp_path, offload="eager")
    engine.run(PROMPT)
    assert engine.scheduler.connector.take_events() == []
    assert engine.cache.pool._log is None and engine.half._events is None
    assert engine.cache.statistics().chunks_stored >= 7


def test_events_travel_as_vllm_sends_them(start):
    engine = start()
    events = []
    engine.router.publish = lambda batch: events.extend(batch.events)
    say(engine, salt="tenant 7", lora=LoRARequest("pirate", 3, "/pirate"), image="a cat")
    engine.scheduler.connector.reset_cache()
    events += engine.scheduler.connector.take_events()
    ours = [each for each in events if each.medium == "CPU"]
    assert {type(each) for each in ours} == {BlockStored, BlockRemoved}
    sent = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(sent, type=KVEventBatch)) == sent
    assert {field for each in ours for field in msgspec.to_builtins(each)} <= READ_BY_ROUTERS | {"type"}


def test_events_come_through_a_multi_connector(tmp_path):
    config = multi_config(tmp_path, SILENT, OURS)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    multi = MultiConnector(config, KVConnectorRole.SCHEDULER, one_group(80))
    multi.bind_gpu_block_pool(BlockPool(80, enable_caching=True, hash_block_size=BLOCK))
    assert list(multi.take_events()) == []
    ours = next(part for part in multi._connectors if type(part).__name__ == "CPUPrefixCacheConnector")
    pool = ours.scheduler.cache.pool
    pool.grow(4)
    pool.commit(pool.allocate(2), [b"a" * 32, b"b" * 32], pool.root, pool.touch(None))
    assert [event.block_hashes for event in multi.take_events()] == [[b"a" * 32], [b"b" * 32]]
