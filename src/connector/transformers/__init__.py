"""Host memory as the prefix cache of Hugging Face models: a past of a prompt begins where earlier ones ended.

The past is transformers' own cache, and goes to anything that takes `past_key_values`:

    cache = HostPrefixCache(model, host_bytes="8GiB")    # any causal model: full attention, windows, states
    with cache.past(input_ids) as past:
        output = model.generate(input_ids, past_key_values=past)
    print(past.hit_tokens)
"""

from connector.transformers.held import Past
from connector.transformers.host_prefix_cache import HostPrefixCache
from connector.transformers.inputs import PromptRefused
from connector.transformers.past import ModelPast

__all__ = ["HostPrefixCache", "ModelPast", "Past", "PromptRefused"]
