"""A HostCache with a coded group, over the smallest engine: bits come back, and raw and coded caches never meet."""

import pytest
import torch

from cpu_prefix_cache import ConfigurationError, FileTier, Prefix, SharedTier, keys_and_values
from cpu_prefix_cache.testing import MemoryStore
from cpu_prefix_cache.tiers.tier_cache import TierCache
from tests.support.host_engine import GRID, PATIENCE, HostEngine, keys_of

PROMPT = "abcd"


class Engine(HostEngine):
    """Chunks of one prompt, each with 2 KiB of bf16, kept in 1,568 bytes."""

    def __init__(self, content, codec="exponent", host_bytes=16 * 1568, **options):
        self.content = dict(zip(keys_of(PROMPT), content, strict=True))
        kv = torch.randn(2, 1, 8, GRID, 128).bfloat16()
        super().__init__(kv=kv, codec=codec, host_bytes=host_bytes, **options)

    def contents(self, key):
        return self.content[key]

    def stores(self):
        assert self.serves(PROMPT) == 0
        self.rests()
        self.forgets()


@pytest.fixture
def content():
    return torch.randn(len(PROMPT), 2, 1, GRID, 128).bfloat16()


def test_bits_come_back(content):
    content[1, 0, 0, 3, :4] = torch.tensor([2.0**-30, -0.0, 2.0**-130, 0.0])
    engine = Engine(content)
    engine.stores()
    assert engine.serves(PROMPT) == 4
    assert engine.host.statistics().cache.bytes_loaded == 4 * 1568


def test_the_first_token_of_a_prompt_fits(content):
    """Its keys have channels far above all others (massive activations, arXiv 2402.17762)."""
    for channel, size in ((5, 2.0**12), (60, -(2.0**14)), (101, 2.0**16)):
        content[0, 0, 0, 0, channel] = size
    engine = Engine(content)
    engine.stores()
    assert engine.serves(PROMPT) == 4 and engine.host.statistics().cache.store_unfit == 0


def test_a_chunk_that_does_not_fit_is_computed_again(content):
    content[2, 1] = torch.randint(-32768, 32768, (1, GRID, 128)).to(torch.int16).view(torch.bfloat16)
    engine = Engine(content)
    engine.stores()
    assert engine.serves(PROMPT) == 2 and engine.host.statistics().cache.store_unfit >= 2


@pytest.mark.parametrize("kind", ["files", "a store"])
@pytest.mark.parametrize(("then", "found"), [("exponent", 4), ("none", 0)])
def test_a_coded_and_a_raw_cache_never_meet_below(tmp_path, content, monkeypatch, kind, then, found):
    """However long the machine takes to read."""
    monkeypatch.setattr(TierCache, "seconds_to_read", lambda cache, num_bytes: PATIENCE)
    named, store = dict(model="tiny", revision="1"), MemoryStore()
    for codec, loaded in (("exponent", 0), (then, found)):
        files = FileTier(str(tmp_path), 1 << 20, **named)
        below = files if kind == "files" else SharedTier(store, ask_seconds=PATIENCE, **named)
        engine = Engine(content, codec, host_bytes=64 << 10, below=below)
        with engine.host:
            assert engine.serves(PROMPT) == loaded
            engine.rests()


def test_kv_that_the_codec_is_not_for_is_refused():
    parts = keys_and_values(torch.zeros(2, 8, GRID, 128), block_dim=1)
    with pytest.raises(ConfigurationError, match="is for bfloat16, and the key of layer 0 is float32"):
        Prefix(parts, block_tokens=GRID, codec="exponent")
    with pytest.raises(ConfigurationError, match="codec must be one of none, exponent; got 'zip'"):
        Prefix(parts, block_tokens=GRID, codec="zip")
