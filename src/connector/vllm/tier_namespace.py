"""Fields that are equal where one vLLM process may serve KV of another, besides those of every engine (`namespace.py`).

    the engine    release, platform, backend as configured, what the model computes with, ranks, how they divide tokens
    each rank     the order in which its rows lie: vLLM's, because `tensors.py` copies them as they are

The first is known to the scheduler, too, and names the folder (`connector/tier/namespace.py`).
"""

import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import vllm
from vllm import envs, platforms
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.tier.namespace import digest, digest_of_files
from connector.vllm.groups import planned_group_ids
from connector.vllm.weights import drafter_of
from cpu_prefix_cache import FileTier, NodePool, SharedTier
from cpu_prefix_cache.deciding import HybridChunkPlanner
from cpu_prefix_cache.tier import Namespace, Value

LENGTH_COUNTS = ("longrope", "llama4")  # in the configuration of a model whose K differ with --max-model-len
AUTO = -1  # the length is made to fit the memory, after the model is built with its own
PROCESSORS = "*processor_config.json"  # files of a model, by which transformers makes pixels of images and videos
VARIABLES = (  # of the environment
    "VLLM_VIDEO_LOADER_BACKEND",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
)


def engine_namespace(
    said: FileTier | SharedTier | NodePool,
    planner: HybridChunkPlanner,
    vllm_config: VllmConfig,
    hash_tokens: int,
    owners: int,
) -> Namespace:
    """Namespace of an engine of which `owners` ranks have bytes of their own. Keys are of hashes of so many tokens."""
    extra = engine_fields(vllm_config, hash_tokens, has_length=isinstance(said, NodePool))
    return said.namespace(planner, dtype=str(vllm_config.cache_config.cache_dtype), ranks=owners, extra=extra)


def engine_fields(vllm_config: VllmConfig, hash_tokens: int, *, has_length: bool = False) -> dict[str, Value]:
    """Fields that decide the bytes or the keys of an engine of vLLM's, beside dtype, geometry and the order of rows."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return {
        "engine": f"vllm {vllm.__version__}",
        "platform": str(vllm_config.device_config.device_type),
        "configured backend": str(vllm_config.attention_config.backend),
        "model dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "model configuration": digest(model.hf_config.to_dict()),
        "drafter": _drafter(vllm_config),
        "tensor parallel ranks": parallel.tensor_parallel_size,
        "pipeline parallel ranks": parallel.pipeline_parallel_size,
        "hash tokens": hash_tokens,
        **_context_parallel(parallel),
        **_length(model, has_length),
        **_given(vllm_config),
        **_code(model),
        **_files(vllm_config),
    }


def _context_parallel(parallel: ParallelConfig) -> dict[str, Value]:
    """How ranks divide the tokens of a prompt. Nothing where they do not, so that folders from before are found.

    Workers have the interleave that counts, because vLLM adapts it there to other connectors; a tier is opened with the
    first worker's namespace.
    """
    if parallel.decode_context_parallel_size == parallel.prefill_context_parallel_size == 1:
        return {}
    return {
        "decode context parallel ranks": parallel.decode_context_parallel_size,
        "prefill context parallel ranks": parallel.prefill_context_parallel_size,
        "context parallel interleave": parallel.cp_kv_cache_interleave_size,
    }


def _length(model: ModelConfig, always: bool) -> dict[str, Value]:
    """The length for which vLLM builds the model. Nothing in a tier of a model to which it is the same, so that folders
    from before are found.
    """
    if always or any(word in str(model.hf_config.to_dict()) for word in LENGTH_COUNTS):
        return {"model length": AUTO if model.original_max_model_len == AUTO else model.max_model_len}
    return {}


def _given(vllm_config: VllmConfig) -> dict[str, Value]:
    """Options that decide bytes and are in no key, as far as they are given, so that folders from before are found."""
    model, adapters, speculative = vllm_config.model_config, vllm_config.lora_config, vllm_config.speculative_config
    media = model.multimodal_config
    given: dict[str, object] = {
        "quantization of layers": model.quantization_config,
        "adapted modules": None if adapters is None else sorted(adapters.target_modules or ()),
        "model implementation": None if model.model_impl == "auto" else model.model_impl,
        "model classes": model.model_class_overrides,
        "code revision": model.code_revision,
        "drafter dtype": None if speculative is None else speculative.kv_cache_dtype,
        **{name: os.environ.get(name) for name in VARIABLES},
    }
    if media is not None:
        pruning = (media.video_pruning_method, media.video_pruning_rate) if media.video_pruning_rate else None
        given |= {
            "media reader": media.media_io_kwargs,
            "media processor": media.mm_processor_kwargs,
            "video pruning": pruning,
            "media encoder dtype": media.mm_encoder_attn_dtype,
        }
    return {name: digest([str(_in_order(value))]) for name, value in given.items() if value}


def _in_order(value: object) -> object:
    """A value whose dictionaries are alike in whatever order they were given."""
    if isinstance(value, Mapping):
        return {name: _in_order(value[name]) for name in sorted(value, key=str)}
    return [_in_order(each) for each in value] if isinstance(value, list) else value


def _code(model: ModelConfig) -> dict[str, Value]:
    """The release of transformers where its code computes: of processors, which make pixels of images, or of models."""
    is_used = model.multimodal_config is not None or model.model_impl == "transformers"
    return {"transformers": metadata.version("transformers")} if is_used or model.using_transformers_backend() else {}


def _files(vllm_config: VllmConfig) -> dict[str, Value]:
    """Local files that decide bytes beside configurations and weights: code that is trusted, what a processor makes
    pixels of images by, and scales of their encoder. Those of a hub are of the commit of the weights.

    Raises ConfigurationError where one cannot be read.
    """
    model, draft = vllm_config.model_config, drafter_of(vllm_config)
    trusted = [Path(each.model) for each in (model, draft) if each is not None and each.trust_remote_code]
    code = {
        f"{at} {file.relative_to(folder)}": file
        for at, folder in enumerate(trusted)
        for file in folder.rglob("*.py")
        if file.is_file()
    }
    found = {"remote code": code}
    media = model.multimodal_config
    if media is not None:
        found["media processor files"] = {file.name: file for file in Path(model.model).glob(PROCESSORS)}
        scales = media.mm_encoder_fp8_scale_path
        found["media encoder scales"] = {} if scales is None else {"scales": Path(scales)}
    return {name: digest_of_files(name, files) for name, files in found.items() if files}


def row_order(kv_cache_config: KVCacheConfig, orders: Mapping[str, str], layers: Mapping[str, Any]) -> str:
    """How rows lie in the host blocks of a rank. `orders` are the rows of each layer's KV here, `layers` vLLM's."""
    lines = list(_lines(kv_cache_config, orders, layers))
    distinct = sorted({line.partition(" ")[2] for line in lines})
    return "; ".join((*forms(), *distinct, f"{len(lines)} layers {digest(lines)[:16]}"))


def _lines(kv_cache_config: KVCacheConfig, orders: Mapping[str, str], layers: Mapping[str, Any]) -> Iterator[str]:
    for at in planned_group_ids(kv_cache_config):
        for name in kv_cache_config.kv_cache_groups[at].layer_names:
            if name in orders:
                yield f"{at}.{name} {_backend_of(layers.get(name))} {orders[name]}"


def forms() -> Iterator[str]:
    """Forms in which vLLM writes KV on this platform, and which neither its type nor its shape shows: kernels may write
    scales and what is packed by the architecture. On the model of a GPU rounding alone depends.
    """
    platform = platforms.current_platform
    if (capability := platform.get_device_capability()) is not None:
        yield f"capability {capability.major}.{capability.minor}"
    if platform.is_fp8_fnuz():  # half of what the same byte is on other devices
        yield "e4m3fnuz"
    if platform.is_rocm() and envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT:
        yield "shuffled"


def _backend_of(layer: Any) -> str:
    """The name of the backend that reads and writes a layer's KV, and the instructions that it packs it for, as only
    that of CPUs does. Empty where vLLM has no such layer.
    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # workers have it already

    if not isinstance(layer, AttentionLayerBase):
        return ""
    name, instructions = str(layer.get_attn_backend().__name__), vars(layer).get("isa")
    return name if instructions is None else f"{name} {instructions}"


def _drafter(vllm_config: VllmConfig) -> str:
    """The model that drafts, whose KV is kept beside that of the other one."""
    speculative, draft = vllm_config.speculative_config, drafter_of(vllm_config)
    if speculative is None or draft is None:
        return "none"
    return f"{speculative.method} {draft.model} {digest(draft.hf_config.to_dict())}"
