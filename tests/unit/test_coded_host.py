"""A HostCache with a coded group, over the smallest engine: bits come back, and raw and coded caches never meet."""

import pytest
import torch

from cpu_prefix_cache import ChainHasher, ConfigurationError, FileTier, Hit, HostCache, Pending, Prefix, keys_and_values
from tests.support.small_engine import SmallEngine

BLOCK = 16
BLOCKS = 8
PROMPT = list(range(4 * BLOCK + 1))


class Engine:
    """A request at a time. `kv` is [2, blocks, 16 tokens, 32 numbers] of bf16: 2 KiB a block, kept in 1,568 bytes."""

    def __init__(self, codec="exponent", host_bytes=16 * 1568, **options):
        self.device = SmallEngine(BLOCKS, hands_out_first=False)
        self.kv = torch.randn(2, BLOCKS, BLOCK, 32).bfloat16()
        self.hasher = ChainHasher(BLOCK, "sha256")
        layout = [Prefix(keys_and_values(self.kv, block_dim=1), block_tokens=BLOCK, codec=codec)]
        given = dict(host_bytes=host_bytes, max_model_len=1_000, offload="eager", strict=True) | options
        self.host = HostCache(self.device, layout, **given)

    def asks(self, tokens, content):
        """The KV of the prompt's blocks when it has run; `content`, [2, chunks, ...], is what it computes."""
        keys = []
        self.hasher.extend(keys, tokens)
        request = self.device.take(keys, 0, len(tokens))
        blocks = request.blocks
        while isinstance(answer := self._start(keys, tokens, blocks), Pending):
            self.rests()
        self.host.begin_step()
        start = 0
        if isinstance(answer, Hit):
            ((_, start),) = self.host.drain()
        self.kv[:, blocks[start // BLOCK : len(keys)]] = content[:, start // BLOCK :]
        self.device.computed(request, len(keys))
        self.host.end_step({"r": len(tokens)})
        self.host.begin_step()
        self.host.drain()
        self.host.end("r", len(tokens))
        self.device.free(request)
        return start, self.kv[:, blocks[: len(keys)]].clone()

    def _start(self, keys, tokens, blocks):
        return self.host.start(
            "r",
            keys,
            num_tokens=len(tokens),
            on_device=0,
            allocate=lambda start, boundary: blocks[start // BLOCK : boundary // BLOCK],
        )

    def rests(self):
        self.host.begin_step()
        self.host.drain()
        self.host.end_step({})

    def forgets(self):
        for block in range(BLOCKS):
            self.device.forget(block)
        self.kv.fill_(-1)


def test_bits_come_back():
    engine = Engine()
    content = torch.randn(2, 4, BLOCK, 32).bfloat16()
    content[0, 1, 3, :4] = torch.tensor([2.0**-30, -0.0, 2.0**-130, 0.0])
    assert engine.asks(PROMPT, content)[0] == 0
    engine.forgets()
    start, kv = engine.asks(PROMPT, torch.zeros_like(content))
    assert start == 4 * BLOCK
    assert torch.equal(kv.view(torch.int16), content.view(torch.int16))
    assert engine.host.statistics().cache.bytes_loaded == 4 * 1568


def test_a_chunk_that_does_not_fit_is_computed_again():
    engine = Engine()
    content = torch.randn(2, 4, BLOCK, 32).bfloat16()
    content[1, 2] = torch.randint(-32768, 32768, (BLOCK, 32)).to(torch.int16).view(torch.bfloat16)
    engine.asks(PROMPT, content)
    engine.forgets()
    start, kv = engine.asks(PROMPT, content)
    assert start == 2 * BLOCK and engine.host.statistics().cache.store_unfit >= 2
    assert torch.equal(kv.view(torch.int16), content.view(torch.int16))


@pytest.mark.parametrize(("first", "then", "found"), [("exponent", "exponent", 64), ("exponent", "none", 0)])
def test_a_coded_and_a_raw_cache_never_meet_in_a_file(tmp_path, first, then, found):
    content = torch.randn(2, 4, BLOCK, 32).bfloat16()
    for codec, start in ((first, 0), (then, found)):
        below = FileTier(str(tmp_path), 1 << 20, model="tiny", revision="1")
        engine = Engine(codec, host_bytes=64 << 10, below=below)
        with engine.host:
            assert engine.asks(PROMPT, content)[0] == start
            for _ in range(4):
                engine.rests()


def test_kv_that_the_codec_is_not_for_is_refused():
    parts = keys_and_values(torch.zeros(2, 8, BLOCK, 32), block_dim=1)
    with pytest.raises(ConfigurationError, match="is for bfloat16, and the key of layer 0 is float32"):
        Prefix(parts, block_tokens=BLOCK, codec="exponent")
    with pytest.raises(ConfigurationError, match="codec must be one of none, exponent; got 'zip'"):
        Prefix(parts, block_tokens=BLOCK, codec="zip")
