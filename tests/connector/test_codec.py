"""A past whose full attention lies coded on the host: as good as a raw one, bit by bit, in fewer bytes."""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from connector.transformers import HostPrefixCache
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.testing import CorruptingCopier
from tests.connector.running import document
from tests.connector.serving import LONGEST, Pair, generated, model

BF16 = torch.bfloat16
BLOCK = 64  # tokens: parts of whole units


def hit(family, codec, wrap_copier=None):
    """Tokens that came from the host, the logits that followed, and the bytes of a host block of full attention."""
    with Pair(family, dtype=BF16, block_tokens=BLOCK, codec=codec, wrap_copier=wrap_copier).cache as cache:
        ids = document(1, LONGEST)
        for tokens in (ids, *(document(9000 + seed, LONGEST) for seed in range(4))):
            with cache.past(tokens) as past:
                generated(cache.model, tokens, past)
        with cache.past(ids) as past:
            logits, _ = generated(cache.model, ids, past)
        return past.hit_tokens - past.device_hit_tokens, logits, cache.planner.groups[0].kept_bytes


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_a_past_from_coded_blocks_gives_the_logits_of_raw_ones(family):
    (raw_tokens, raw, raw_bytes), (tokens, coded, coded_bytes) = hit(family, "none"), hit(family, "exponent")
    assert tokens == raw_tokens == 2 * BLOCK
    assert all(map(torch.equal, coded, raw))
    assert 64 * coded_bytes == 49 * raw_bytes


def test_a_damaged_coded_block_changes_the_logits():
    _, damaged, _ = hit("llama", "exponent", lambda *args: CorruptingCopier(*args, loads=None))
    assert not torch.equal(damaged[0], hit("llama", "exponent")[1][0])


def test_a_model_in_another_dtype_is_refused():
    with pytest.raises(ConfigurationError, match='codec "exponent" is for bfloat16'):
        HostPrefixCache(model("llama"), host_bytes="1MiB", block_tokens=BLOCK, codec="exponent")


def test_a_model_without_full_attention_is_refused():
    sizes = dict(vocab_size=320, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    windows = MistralForCausalLM(MistralConfig(**sizes, num_hidden_layers=2, sliding_window=32)).to(BF16)
    with pytest.raises(ConfigurationError, match="is for full attention, of which MistralForCausalLM has none"):
        HostPrefixCache(windows, host_bytes="1MiB", max_model_len=LONGEST, codec="exponent")
