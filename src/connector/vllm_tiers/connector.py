"""CPUPrefixCacheOffloadingConnector: vLLM's OffloadingConnector, while whose parts are made they may ask vLLM for the
configuration of the engine, as the parts of a model may.

vLLM's own hands its tiers what they need to copy rows. What the bytes depend on is not in it: a model's rotary scaling,
quantization, what an image is made into, whether there are adapters or a drafter.
"""

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import KVCacheConfig


class CPUPrefixCacheOffloadingConnector(OffloadingConnector):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)
