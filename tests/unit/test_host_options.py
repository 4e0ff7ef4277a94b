"""A HostCache that cannot work is refused when it is built, with the option by its name and what it must be."""

import numpy
import pytest
import torch

from cpu_prefix_cache import ConfigurationError, QueueDevice, RadixHostCache
from cpu_prefix_cache.deciding import CacheOptions, CPUPrefixCache, HybridChunkPlanner, PrefixGroup, WindowGroup
from cpu_prefix_cache.host_cache import HostCache
from cpu_prefix_cache.kv_layout import ChunkLocal, Prefix, State, Window, keys_and_values, latents, states
from cpu_prefix_cache.memory.parts import Role, blocks_first
from tests.support.host_options import with_options
from tests.support.small_engine import SmallEngine

BLOCKS = 8
LAYERS = 3
TOKENS = 4


def tensor(blocks=BLOCKS, layers=LAYERS):
    return torch.zeros(2, layers, blocks, TOKENS, 5, dtype=torch.int16)


def built(device=None, groups=None, kv=None, block_dim=2, **options):
    device = SmallEngine(BLOCKS) if device is None else device
    if groups is None:
        groups = [Prefix(keys_and_values(tensor() if kv is None else kv, block_dim=block_dim), block_tokens=TOKENS)]
    options = {"host_bytes": 1 << 14, "max_model_len": 100, "offload": "eager", **options}
    return HostCache(device, groups, **with_options(**options))


class Tree(RadixHostCache):
    """A tree with nothing in it."""

    num_waiting = 0
    free_pages = free = parent = pages = last_use = locks = lock = None


def built_tree(groups=None, num_pages=BLOCKS, chunk_tokens=TOKENS):
    if groups is None:
        groups = [Prefix(keys_and_values(tensor(), block_dim=2), block_tokens=TOKENS)]
    return Tree(num_pages, groups, chunk_tokens=chunk_tokens, host_bytes=1 << 14, max_model_len=100)


def test_valid_options_are_accepted():
    with built(host_bytes=numpy.int64(1 << 14), threads=False, load_seconds=0.5, strict=True):
        pass


def test_a_device_has_one_cache_at_a_time():
    """Each would hold blocks without the other's knowledge."""
    device = SmallEngine(BLOCKS)
    with built(device), pytest.raises(ConfigurationError, match="this device has a HostCache already"):
        built(device)
    forgotten = built(device)
    forgotten.itself = forgotten  # only a collection finds it
    del forgotten
    built(device).close()


# Options


@pytest.mark.parametrize(
    ("option", "value", "must"),
    [
        *(("host_bytes", each, r"number of bytes \(48 GiB are 48 << 30\)") for each in (48e9, "48GiB", None, -1, True)),
        *(("max_model_len", each, "tokens, at least 1") for each in (0, -1, 8192.0, None)),
        *(("max_step_tokens", each, "tokens, at least 1") for each in (None, 0, 8192.0)),
        *(("load_seconds", each, "seconds above 0, or None") for each in (-1, 0, float("nan"), "30", True)),
        *(("strict", each, "True or False") for each in ("no", 1, None)),
        *(("threads", each, "True, False, or None") for each in ("no", 2)),
        *(("wrap_copier", each, "a function of the copier and the tensors, or None") for each in (3, "wrap")),
        *(("min_load_tokens", each, "number of at least 0") for each in (-1, 16.0)),
        *(("checkpoint_interval", each, "number of at least 1") for each in (0, 16.0)),
        *(("store_after", each, "number of at least 1") for each in (0, None)),
        *(("min_store_tokens", each, "number of at least 0") for each in (-1, None)),
        *(("device", each, "an instance of QueueDevice") for each in (object(), SmallEngine, 7)),
    ],
)
@pytest.mark.parametrize("offload", ["eager", "lazy"])
def test_an_option_that_is_not_what_it_must_be(option, value, must, offload):
    with pytest.raises(ConfigurationError, match=f"^{option} must be .*{must}.*, got "):
        built(offload=offload, **{option: value})


@pytest.mark.parametrize("policy", [None, 7, ["lru"], ""])
def test_a_policy_has_a_name(policy):
    with pytest.raises(ConfigurationError, match="policy is a text that is not empty"):
        built(policy=policy)


@pytest.mark.parametrize("options", [None, {"policy": "arc"}, CacheOptions()])
def test_options_are_those_of_a_host_cache(options):
    device, group = SmallEngine(BLOCKS), Prefix(keys_and_values(tensor(), block_dim=2), block_tokens=TOKENS)
    with pytest.raises(ConfigurationError, match=r"options must be HostOptions\("):
        HostCache(device, [group], host_bytes=1 << 14, max_model_len=100, options=options)


@pytest.mark.parametrize("num_blocks", [0, -1, 1.5, True, None, "8"])
def test_a_queue_device_has_blocks(num_blocks):
    with pytest.raises(ConfigurationError, match="num_blocks must be a whole number of at least 1"):
        QueueDevice.__init__(SmallEngine(1), num_blocks)


# The layout


@pytest.mark.parametrize("groups", [Prefix(keys_and_values(tensor(), block_dim=2), block_tokens=4), 7, [7], ["all"]])
def test_groups_are_a_list(groups):
    with pytest.raises(ConfigurationError, match="groups are a list of Prefix, Window, ChunkLocal, State or KVGroup"):
        built(groups=groups)


@pytest.mark.parametrize("parts", [tensor(), [tensor()], None, 7], ids=lambda parts: type(parts).__name__)
def test_parts_are_made_of_tensors(parts):
    with pytest.raises(ConfigurationError, match="needs parts, made of its tensors by keys_and_values"):
        Prefix(parts, block_tokens=TOKENS)


@pytest.mark.parametrize("block_tokens", [4.0, "4", 0, None, True])
def test_the_tokens_of_a_block_are_a_whole_number(block_tokens):
    with pytest.raises(ConfigurationError, match="block_tokens"):
        Prefix(keys_and_values(tensor(), block_dim=2), block_tokens=block_tokens)
    with pytest.raises(ConfigurationError, match="block_tokens"):
        latents(torch.zeros(32, 6), block_tokens=block_tokens)


WORDS = {
    "keys_and_values": lambda kv: keys_and_values(kv, block_dim=2),
    "latents": lambda kv: latents(kv, block_tokens=4),
    "states": states,
    "blocks_first": lambda kv: [blocks_first(0, Role.KEY, kv)],
}


@pytest.mark.parametrize("word", WORDS)
def test_kv_lies_in_tensors_with_memory(word):
    with pytest.raises(ConfigurationError, match="on the meta device has no memory"):
        WORDS[word](torch.zeros(2, 3, 8, 4, 5, device="meta"))
    with pytest.raises(ConfigurationError, match="KV lies in tensors of torch"):
        WORDS[word](numpy.zeros((2, 3, 8, 4, 5)))


@pytest.mark.parametrize("block_dim", [1, 3])
@pytest.mark.parametrize(("layers", "spare"), [(3, 0), (3, 1), (10, 0), (10, 1), (12, 0), (12, 1)])
def test_the_dimension_of_blocks_is_off_by_one(layers, block_dim, spare):
    """With fewer layers than blocks every copy would fail; with more, blocks of other requests are overwritten."""
    with pytest.raises(ConfigurationError, match="give block_dim the dimension of the blocks"):
        built(kv=tensor(BLOCKS + spare, layers), block_dim=block_dim)


def test_one_layer_has_fewer_blocks_than_the_device():
    kv = [torch.zeros(2, blocks, TOKENS, 5) for blocks in (8, 7, 8)]
    with pytest.raises(ConfigurationError, match="the key of layer 1 of group 'attention' has 7 blocks"):
        built(groups=[Prefix(keys_and_values(*kv, block_dim=1), block_tokens=TOKENS)])


@pytest.mark.parametrize("blocks", [8, 9, 20])
def test_blocks_that_are_never_handed_out_are_no_fault(blocks):
    built(kv=tensor(blocks)).close()


@pytest.mark.parametrize("layers", [BLOCKS, BLOCKS + 1])
def test_a_null_block_beside_as_many_layers_is_no_fault(layers):
    """Or heads, or whatever else: both sizes are what a device of so many blocks may have."""
    built(kv=tensor(BLOCKS + 1, layers)).close()


def test_tokens_of_a_block_are_given_twice():
    """Every loaded block would be wrong, and nothing would fail."""
    kv = latents(torch.zeros(64, 6), block_tokens=8)
    with pytest.raises(ConfigurationError, match="the latent of layer 0 has blocks of 8 tokens, and group 'attention'"):
        Prefix(kv, block_tokens=16)
    assert Prefix(kv, block_tokens=16, device_blocks=2).num_blocks == 8


# The device


@pytest.mark.parametrize("build", [lambda groups: built(groups=groups), built_tree], ids=["queue", "radix"])
@pytest.mark.parametrize("kind", [Window, ChunkLocal, State])
def test_a_device_that_finds_no_checkpoints_is_none_for_windows_and_states(build, kind):
    """Nothing would be stored, and no counter would show it."""
    options = {} if kind is State else {"window_tokens": 8}
    attention, other = (keys_and_values(tensor(), block_dim=2) for _ in range(2))
    groups = [Prefix(attention, block_tokens=TOKENS), kind(other, block_tokens=TOKENS, **options)]
    with pytest.raises(ConfigurationError, match="has no find_checkpoint: nothing of a window"):
        build(groups)


def test_the_deciding_half_alone_refuses_such_a_device():
    groups = [WindowGroup(name="window", block_tokens=TOKENS, block_bytes=64, window_tokens=8)]
    planner = HybridChunkPlanner(groups, max_model_len=100)
    with pytest.raises(ConfigurationError, match="SmallEngine has no find_checkpoint"):
        CPUPrefixCache(planner, SmallEngine(BLOCKS), host_blocks=16)


class TwoToAChunk(SmallEngine):
    blocks_per_chunk = 2


def test_chunks_have_the_blocks_that_the_device_finds():
    with built(TwoToAChunk(BLOCKS)) as wide, built() as usual:
        assert [host.cache.planner.grid_tokens for host in (wide, usual)] == [2 * TOKENS, TOKENS]
    two = [Prefix(keys_and_values(tensor(), block_dim=2), block_tokens=TOKENS, name=name) for name in ("full", "other")]
    with built(TwoToAChunk(BLOCKS), two) as host:
        assert host.cache.planner.grid_tokens == TOKENS


def test_a_device_that_finds_other_blocks_than_those_of_a_chunk_is_refused():
    two = [Prefix(keys_and_values(tensor(), block_dim=2), block_tokens=TOKENS, name=name) for name in ("full", "other")]
    with pytest.raises(ConfigurationError, match="takes 2 device blocks, but SmallEngine has 1"):
        built(groups=two)
    full = PrefixGroup(name="full", block_tokens=TOKENS, block_bytes=64)
    planner = HybridChunkPlanner([full], max_model_len=100, grid_tokens=2 * TOKENS)
    with pytest.raises(ConfigurationError, match="grid must be the tokens of so many blocks"):
        CPUPrefixCache(planner, SmallEngine(BLOCKS), host_blocks=16)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"chunk_tokens": 6}, "chunk_tokens must be a multiple of the 4 tokens of a page, got 6"),
        ({"chunk_tokens": 2}, "chunk_tokens must be a multiple of the 4 tokens of a page, got 2"),
        ({"chunk_tokens": 0}, "chunk_tokens must be a whole number of at least 1, got 0"),
        ({"chunk_tokens": 4.0}, "chunk_tokens must be a whole number of at least 1, got 4.0"),
        ({"num_pages": 0}, "at least 1, got 0 pages"),
        ({"num_pages": 9}, "has 8 blocks, but the device hands out 9"),
        ({"groups": []}, "groups are a list of Prefix"),
    ],
)
def test_a_radix_tree_that_does_not_fit_is_refused(options, told):
    with pytest.raises(ConfigurationError, match=told):
        built_tree(**options)
