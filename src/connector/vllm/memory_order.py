"""The order in which vLLM keeps KV in the device's memory, as far as a connector may ask for one.

    layers first    vLLM's own: a block is a fragment in each layer. It crosses the link through a staging ring, whose
                    kernels wait for a free multiprocessor: beside the matrix products of prefill 22 GB/s (one H200)
    blocks first    a block lies in one piece. If it is large enough it crosses directly, beside them at 52 GB/s

vLLM takes it for the whole engine where its attention can, else it logs a warning and keeps its own. Whoever sets
VLLM_KV_CACHE_LAYOUT has the last word.
"""

import sys

from vllm import platforms
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

from connector.common.options import CODEC
from cpu_prefix_cache.deciding import RAW

BLOCKS_FIRST = "BLNHC"
BLOCKS_FIRST_BY_HEAD = "BLHNC"
ONLY_BY_HEAD = 10  # the major compute capability of devices on which FlashInfer takes no other: Blackwell's


def wanted_order(config: VllmConfig) -> str | None:
    """The order to ask for, by vLLM's name, or None: where blocks cross as fast in vLLM's own, because they are coded
    or in host memory, and where blocks first is not known to compute the same: latents and states.
    """
    model, platform = config.model_config, platforms.current_platform
    options = config.kv_transfer_config.kv_connector_extra_config
    if not platform.is_cuda() or model.use_mla or model.is_hybrid or options.get(CODEC, RAW) != RAW:
        return None
    if not config.cache_config.enable_prefix_caching:
        return None
    capability = platform.get_device_capability()
    by_head = capability is not None and capability.major == ONLY_BY_HEAD
    return BLOCKS_FIRST_BY_HEAD if by_head else BLOCKS_FIRST


def is_asked_for_the_engine() -> bool:
    """Whether the caller of the caller is vLLM itself. MultiConnector, which asks each of its connectors, refuses to
    start with two answers, and ours is only a wish.
    """
    return sys._getframe(2).f_code is get_kv_connector_cache_layout.__code__
