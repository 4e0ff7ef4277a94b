"""States at boundaries, of models that keep one in a slot of each request (DeepSeek-V4): ATOM's, stored as blocks.

ATOM copies the state in a slot into ordinary blocks, *units*, at boundaries of its own choice, and from there into the
slot of a request that resumes. So a state is stored and loaded like other blocks.

    intended    a step has ended at the boundary; the next one begins with the copy, if ATOM has units for it
    copying     that step was launched, so what is launched from now on may read the units
    ready       ATOM finds the state by the hash of the block that ends at the boundary, and evicts it with that
                block, or when it needs the units

A state that is loaded goes another way:

    reserved    units are taken for it, and the load fills them
    loaded      the load has ended; ATOM has still to give the loaded blocks their hashes
    restored    the next step begins with its copy into the slot; it is ready, or if ATOM has one at this boundary
                already, is released after the copy

A model without states has none, of no units.

This is the one file that names what ATOM's coordinator of states is made of; `touched.py` checks it at start.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from connector.atom.pool_view import NO_HASH, Units
from cpu_prefix_cache import ConfigurationError

STATES = ("_pending", "store")  # of a coordinator of states
STORE = (
    "_lru",
    "_new_identity",
    "_pending_by_hash",
    "_queued_restores",
    "_release_restore_pin",
    "cancel_queued_restore",
    "contains",
    "ensure_free_units",
    "hash_to_checkpoint",
    "records",
    "spec",
    "units_per_checkpoint",
)


@dataclass(frozen=True, slots=True)
class _Loading:
    seq: Any
    number: int  # of the state, among ATOM's
    units: tuple[int, ...]


class States:
    """The states that a PagedStateCheckpointCoordinator of ATOM keeps in the blocks of `pool`; by default none."""

    def __init__(self, pool: Any = None, kept: Any = None, block_tokens: int = 1) -> None:
        self._pool = Units(pool)
        self._kept = kept
        self._block_tokens = block_tokens
        self._loading: dict[Hashable, _Loading] = {}  # by request
        self._loaded: list[Hashable] = []

    @classmethod
    def of(cls, block_manager: Any) -> "States":
        """Raises ConfigurationError if ATOM does not keep states in blocks, or at no boundaries."""
        kept = block_manager.paged_state_checkpoints
        if kept is None and block_manager.num_per_req_cache_groups:
            raise ConfigurationError(
                "this model keeps a state in a slot of each request, and ATOM does not copy it into blocks, which is "
                "all that the host cache can store: start ATOM without it"
            )
        if kept is not None and not block_manager.state_checkpoint_interval_tokens:
            raise ConfigurationError(
                "this model can be resumed only where ATOM has kept a state, and it is to keep none: give "
                f"--state-checkpoint-interval-tokens, a multiple of {block_manager.hash_block_size}"
            )
        return cls(block_manager.kv, kept, block_manager.hash_block_size)

    @property
    def units(self) -> int:
        """How many blocks a state takes."""
        return 0 if self._kept is None else int(self._kept.store.units_per_checkpoint)

    def check_bytes(self, block_bytes: Sequence[int]) -> None:
        """`block_bytes` is what the ranks have found registered of a block, and of a slot.

        Raises ConfigurationError if that is not what ATOM counts.
        """
        spec = None if self._kept is None else self._kept.store.spec
        counted = tuple(block_bytes[:1]) if spec is None else (spec.page_unit_bytes, spec.slot_bytes)
        if tuple(block_bytes) != counted:
            raise ConfigurationError(
                f"ATOM counts {counted} bytes for a block and a slot, and has registered {tuple(block_bytes)}: the "
                "difference would not be stored; start ATOM without the host cache"
            )

    # What ATOM has

    def is_intended(self, seq: Any, block: int) -> bool:
        """Whether ATOM is yet to decide about a state of this request at the end of this block."""
        intended = None if self._kept is None else self._kept._pending.get(id(seq))
        return intended is not None and bool(intended[1] == self._pool.hash(block))

    def at(self, block: int) -> tuple[int, ...] | None:
        """The units of the state at the end of this block, copying or ready; None if there is none."""
        if self._kept is None:
            return None
        store, hash = self._kept.store, self._pool.hash(block)
        record = store.records.get(store.hash_to_checkpoint.get(hash, store._pending_by_hash.get(hash)))
        return None if record is None else record.unit_ids

    # Holds

    def is_unit(self, block: int) -> bool:
        return self._pool.is_unit(block)

    def hold(self, units: Iterable[int]) -> list[int]:
        """Keep these units. A reference keeps their bytes, a pin keeps ATOM from counting on them.

        The numbers of the states that are pinned. One that is being loaded is none of ATOM's yet.
        """
        numbers = {self._pool.owner(unit)[1] for unit in units}
        for unit in units:
            self._pool.hold(unit)
        pinned = [number for number in numbers if number in self._kept.store.records]
        for number in pinned:
            self._kept.store.records[number].pin_count += 1
        return pinned

    def release(self, units: Iterable[int], pinned: Iterable[int]) -> None:
        for unit in units:
            self._pool.release(unit)
        for number in pinned:
            self._kept.store._release_restore_pin(number)

    # Loads

    def reserve(self, seq: Any) -> list[list[int]] | None:
        """Units for the state of a request that is to be loaded, each in a list. None if ATOM has none to hand out."""
        if self._kept is None:
            return []
        store = self._kept.store
        if not store.ensure_free_units(self.units):
            return None
        number = store._new_identity()
        units = self._pool.reserve(self.units, _owner(number))
        self._loading[seq.id] = _Loading(seq, number, units)
        return [[unit] for unit in units]

    def load_ended(self, id: Hashable, ok: bool) -> None:
        if not ok:
            self.forget(id)
        elif id in self._loading:
            self._loaded.append(id)

    def forget(self, id: Hashable) -> None:
        """The request will not resume at the state that was reserved for it, if any was."""
        loading = self._loading.pop(id, None)
        if loading is not None:
            self._pool.give_back(loading.units, _owner(loading.number))

    def restore(self) -> None:
        """A step is about to be planned: the states whose blocks ATOM has taken in go into their slots."""
        loaded, self._loaded = self._loaded, []
        for id in loaded:
            loading = self._loading.get(id)
            if loading is None:
                continue
            if loading.seq.offload_load_start_tokens is not None:
                self._loaded.append(id)
                continue
            del self._loading[id]
            self._restore(loading)

    def _restore(self, loading: _Loading) -> None:
        # Not at the top: ATOM's model engine is there only where ATOM is, and this module also where its double is.
        from atom.model_engine.page_unit_checkpoint import EVICTING, READY, CheckpointRecord, CheckpointRestoreOp

        seq, store = loading.seq, self._kept.store
        last_block = seq.block_table[seq.offload_loaded_tokens // self._block_tokens - 1]
        store.cancel_queued_restore(seq.per_req_cache_group)  # from where the load began
        hash = self._pool.hash(last_block)
        is_new = hash != NO_HASH and not store.contains(hash)
        record = CheckpointRecord(hash, loading.units, READY if is_new else EVICTING, pin_count=1)
        store.records[loading.number] = record
        if is_new:
            store.hash_to_checkpoint[hash] = loading.number
            store._lru[loading.number] = None
        copy = CheckpointRestoreOp(seq.per_req_cache_group, loading.units, store.spec.image_bytes, store.spec.layout_id)
        store._queued_restores.append((loading.number, copy))


def _owner(number: int) -> tuple[str, int]:
    """As whose ATOM reserves the units of a state."""
    return "state-checkpoint", number
