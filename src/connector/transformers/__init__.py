"""Prefix-cached offline generation for Hugging Face models.

model, tokenizer = ...                               # any causal model: full attention, windows, states
generator = PrefixCachedGenerator(model, tokenizer, device_blocks=512, host_bytes=2 * 2**30)
for generation in generator.generate(prompts):
    print(generation.text, generation.host_hit_tokens)
"""

from connector.transformers.generator import (
    ByteTokenizer,
    Generation,
    PrefixCachedGenerator,
    Tokenizer,
)
from connector.transformers.held import Past
from connector.transformers.host_prefix_cache import HostPrefixCache
from connector.transformers.paged import groups_of
from connector.transformers.past import ModelPast
from connector.transformers.prompts import PromptRefused

__all__ = [
    "ByteTokenizer",
    "Generation",
    "HostPrefixCache",
    "ModelPast",
    "Past",
    "PrefixCachedGenerator",
    "PromptRefused",
    "Tokenizer",
    "groups_of",
]
