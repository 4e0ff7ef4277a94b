"""`connector.vllm` with a copier that damages one block of each load of the group that DAMAGED_GROUP names.

For `kv_connector_module_path`: vLLM imports that module in every process of an engine, so the ranks damage, too.
"""

import os

from connector.vllm import CPUPrefixCacheConnector, worker
from tests.faults import damaging

__all__ = ["CPUPrefixCacheConnector"]
NAME = "DAMAGED_GROUP"

worker.choose_copier = damaging(worker.choose_copier, os.environ[NAME])
