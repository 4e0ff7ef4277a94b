"""Prefix-cached offline generation for Hugging Face models.

model, tokenizer = ...                               # any loaded causal model with full attention
generator = PrefixCachedGenerator(model, tokenizer, device_blocks=512, host_bytes=2 * 2**30)
for generation in generator.generate(prompts):
    print(generation.text, generation.host_hit_tokens)
"""

from connector.transformers.builtin import ARCHITECTURES, build_model
from connector.transformers.generator import (
    ByteTokenizer,
    Generation,
    PrefixCachedGenerator,
    PromptRefused,
    Tokenizer,
)

__all__ = [
    "ARCHITECTURES",
    "ByteTokenizer",
    "Generation",
    "PrefixCachedGenerator",
    "PromptRefused",
    "Tokenizer",
    "build_model",
]
