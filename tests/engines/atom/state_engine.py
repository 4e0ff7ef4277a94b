"""ATOM's engine on a CPU with a model like DeepSeek-V4: pages, and a state in a slot of each request.

The state after some tokens is a function of the KV of the last of them, which depends on all before. As on ATOM's
GPUs, a step begins with the copies between slots and units that its batch carries, and in each step a rank compares
the state in the slot of a request with the truth before it computes. Slots are poisoned when they are handed out.
"""

import numpy as np
import torch
from atom.kv_transfer.disaggregation.types import KVTransferRegion, KVTransferTensors
from atom.model_engine.page_unit_checkpoint import PagedStateCheckpointSpec
from atom.model_engine.scheduler import Scheduler
from atom.model_engine.state_runtime import StateRuntime, StateTransfer

from tests.engines.atom.engine import LAYERS, POISON, Engine, Rank, config_of

INTERVAL = 16  # tokens
UNITS, SPARE = 3, 2  # blocks that a state takes; words of a slot that no state has
LAYOUT = "a layout"


def state_config(slots=8, interval=INTERVAL, **said):
    return config_of(pool_entries={"state": slots}, state_checkpoint_interval_tokens=interval, **said)


def spec_of(config):
    page = 2 * LAYERS * config.kv_cache_block_size * 8
    image = UNITS * page
    return PagedStateCheckpointSpec(page, image + 8 * SPARE, LAYOUT, image_bytes=image)


class StateRank(Rank):
    def __init__(self, config, number):
        self.num_slots = config.pool_entries["state"]
        self.words = spec_of(config).image_bytes // 8
        self.memory = torch.full((self.num_slots, self.words + SPARE), POISON, dtype=torch.int64)
        self.slots = self.memory.numpy()[::-1]  # numbered from the end
        super().__init__(config, number)

    def registered(self):
        """DeepSeek-V4 registers nothing by layer."""
        pages = [region(tensor, "page") for layer in self.layers for tensor in layer]
        slots = region(self.memory, "slot", reverse_indexed=True)
        return {}, KVTransferTensors(
            pages,
            [],
            len(self.layers[0][0]),
            num_slots=self.num_slots,
            swa_block_regions=[slots],
            expected_full_slot_region_count=1,
        )

    def state(self, kv):
        """Contents of a slot after a token."""
        return int(kv) + 1000 * self.number + np.arange(self.words)

    def copy(self, ops):
        """Copies of a batch, in the order of ATOM's kernel."""
        for store in ops.checkpoint_stores:
            self._write_units(store.unit_ids, self.slots[store.src_slot, : self.words])
        for restore in ops.checkpoint_restores:
            self.slots[restore.dst_slot, : self.words] = self._read_units(restore.unit_ids)

    def _read_units(self, units):
        return np.concatenate([plane[unit] for unit in units for plane, _ in self.planes])

    def _write_units(self, units, image):
        width = self.block_tokens
        parts = iter(image.reshape(-1, width))
        for unit in units:
            for plane, _ in self.planes:
                plane[unit] = next(parts)


def region(tensor, role, **said):
    unit = tensor[0].numel() * 8
    return KVTransferRegion(tensor.data_ptr(), tensor.numel() * 8, unit, semantic_role=role, **said)


class StateEngine(Engine):
    rank, sequence = StateRank, {"has_per_req_cache": True}

    def __init__(self, config, defers=False):
        self.restored = self.kept = 0  # states, by copies that batches carried
        self.decoded = set()  # the requests of the last batch, if it was no prefill
        self.left = {}  # request -> how many of its tokens its last step had computed, and what it left in the slots
        self.wrong_states = 0  # times a sequence read a state that was not the truth
        super().__init__(config, defers)
        self._poison_slots()

    def new_scheduler(self):
        spec = spec_of(self.config)
        return Scheduler(self.config, state_runtime=StateRuntime(StateTransfer.copy(LAYOUT), spec))

    def _poison_slots(self):
        pop = self.manager.state.pop

        def poisoned():
            slot = pop()
            for rank in self.ranks:
                rank.slots[slot] = POISON
            return slot

        self.manager.state.pop = poisoned

    def _forward(self, batch, seqs):
        ops = batch.state_maintenance_ops
        assert not ops.relocations
        destinations = [each.dst_slot for each in ops.checkpoint_restores]
        assert len(set(destinations)) == len(destinations), "two states for one slot in one launch"
        self.kept += len(ops.checkpoint_stores)
        self.restored += len(ops.checkpoint_restores)
        for rank in self.ranks:
            rank.copy(ops)
        self.decoded = set() if batch.total_seqs_num_prefill else set(seqs)
        return super()._forward(batch, seqs)

    def _compute(self, seq, start, stop, is_prefill):
        """ATOM computes some tokens twice: the last of a prompt in several chunks, and one of an answer after a step of
        other requests. The slot has them then already, as a ring of the last tokens may, and is as the step left it.
        """
        sampled = super()._compute(seq, start, stop, is_prefill)
        kv = self.truths[seq.id].kv
        last_stop, left = self.left.get(seq.id, (0, ()))
        for at, rank in enumerate(self.ranks):
            image = rank.slots[seq.per_req_cache_group, : rank.words]
            is_again = not is_prefill and start < last_stop
            right = left[at] if is_again else rank.state(kv[start - 1])
            self.wrong_states += start > 0 and not np.array_equal(image, right)
            image[:] = rank.state(kv[stop - 1])
        self.left[seq.id] = stop, [rank.state(kv[stop - 1]) for rank in self.ranks]
        return sampled

    @property
    def kept_units(self):
        """The blocks of the states that ATOM keeps."""
        records = self.manager.paged_state_checkpoints.store.records.values()
        return [unit for record in records for unit in record.unit_ids]
