"""Connectors that are no help, or that need it.

FrozenConnector          never knows what it has
BrokenConnector          raises an error at a lookup
LosingConnector          vLLM's example, which loads nothing in `lost` steps and reports the blocks as invalid
SavingConnector          saves each request when it has ended, and reports it when the test lets it: `saved`
"""

from typing import ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from tests.vllm.real_engine import BLOCK
from tests.vllm.silent import SilentConnector


class FrozenConnector(SilentConnector):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return None, False


class BrokenConnector(SilentConnector):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        raise OSError("the other machine is gone")


class LosingConnector(ExampleConnector):
    lost: ClassVar[int] = 0

    def start_load_kv(self, forward_context, **kwargs):
        loads = [each for each in self._get_connector_metadata().requests if not each.is_store]
        self.invalid = set()
        if loads and LosingConnector.lost:
            LosingConnector.lost -= 1
            self.invalid = {int(slot) // BLOCK for each in loads for slot in each.slot_mapping}
        else:
            super().start_load_kv(forward_context, **kwargs)

    def get_block_ids_with_load_errors(self):
        return self.invalid


class SavingConnector(SilentConnector):
    """`saved` is a list of requests for each worker's object, in their order."""

    saved: ClassVar[list[set[str]]] = []

    def register_kv_caches(self, kv_caches):
        self.own = set()
        SavingConnector.saved.append(self.own)

    def request_finished_all_groups(self, request, block_ids):
        return True, None

    def get_transfer_results(self, finished_req_ids):
        sent = set(self.own)
        self.own.clear()
        return KVConnectorTransferResults(finished_sending=sent)
