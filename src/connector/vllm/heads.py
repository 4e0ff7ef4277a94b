"""KV heads of which several ranks of a tensor-parallel group have the same.

vLLM divides the KV heads of a model among its ranks. If there are more ranks than heads, each has one, and adjacent
ranks have the same one: with two heads, ranks 0 to 3 of eight the first, and the others the second.

How many heads a layer has follows from no spec of its KV, which counts those of one rank. So heads are taken for the
same only where the configuration has one number for all layers, under the usual name, and a drafter has it, too.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.config import ModelConfig, VllmConfig

USUAL = "num_key_value_heads"
HEADS = re.compile("(kv|key_value).*head|head.*kv|(query|attention|in)_group|attention_other")  # names of such numbers


def different_heads(vllm_config: VllmConfig) -> int | None:
    """How many different KV heads the ranks have. None: each has others, or that is not certain.

    Ranks on several machines have no memory in common to keep them in.
    """
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend != "mp" or parallel.nnodes > 1:
        return None
    if parallel.decode_context_parallel_size > 1:  # ranks with the same head have other tokens of it
        return None
    counts = {_heads(model) for model in _models(vllm_config)}
    heads = counts.pop()
    ranks = parallel.tensor_parallel_size
    return heads if not counts and heads is not None and heads < ranks and ranks % heads == 0 else None


def _models(vllm_config: VllmConfig) -> Iterator[ModelConfig]:
    yield vllm_config.model_config
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.draft_model_config is not None:
        yield speculative.draft_model_config


def _heads(model: ModelConfig) -> int | None:
    """The KV heads of every layer. None where the configuration has other numbers of them, or none."""
    found = list(_numbers(model.hf_text_config.to_dict()))
    total = model.get_total_num_kv_heads()
    return total if found and total and all(each == (USUAL, total) for each in found) else None


def _numbers(values: Any) -> Iterator[tuple[str, Any]]:
    """Numbers of KV heads in a configuration, by name."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            if not HEADS.search(str(name)):
                yield from _numbers(value)
            elif value is not None:
                yield name, value
    elif isinstance(values, Sequence) and not isinstance(values, str):
        for value in values:
            yield from _numbers(value)
