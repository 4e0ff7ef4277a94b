"""The simulation with a model that keeps states: a request resumes where its prefix and a state are.

    python -m tests.engines.atom.state_simulation VARIANT [REQUESTS] [SEED]        one outcome

The variants are those of the simulation without states, but for shared contexts and superblocks, which are refused.
"""

import logging
import sys
from collections import Counter
from dataclasses import replace

from tests.engines.atom import mends
from tests.engines.atom.simulation import CONTROL, VARIANTS, Outcome, Simulation, Variant, simulate
from tests.engines.atom.state_engine import INTERVAL, StateEngine

# A state takes three blocks, so device and host are larger than without.
STATE_VARIANTS = {
    name: replace(variant, device_blocks=variant.device_blocks * 3 // 2, host_blocks=variant.host_blocks * 3 // 2)
    for name, variant in VARIANTS.items()
    if variant.dcp == 1 and variant.pool != "superblocks"
}


class StateSimulation(Simulation):
    def mend(self) -> None:
        """ATOM cuts prompts where it keeps a state, also where it does not chunk them otherwise."""
        mends.answers_of_preempted_requests_are_prompt(self.engine)
        if self.variant.reset:
            mends.chunks_computed_from_before_a_reset_are_not_found(self.engine)
        if self.variant.defers:
            hashes_of_answers_wait_for_their_step(self.engine)
            mends.aborted_requests_compute_what_they_have(self.engine)

    def new_engine(self, config, defers):
        config.pool_entries = {"state": config.max_num_seqs}
        config.state_checkpoint_interval_tokens = INTERVAL
        return StateEngine(config, defers)

    def outcome(self) -> Outcome:
        outcome = super().outcome()
        outcome.wrong += self.engine.wrong_states
        return outcome

    def leaks(self):
        """Leftovers when ATOM has evicted all states that it may."""
        store, manager = self.engine.manager.paged_state_checkpoints.store, self.engine.manager
        manager.complete_previous_state_batch()
        while (oldest := store._next_victim()) >= 0:
            store._evict(oldest)
        states = self.engine.connector._states
        rest = Counter(
            {
                "states that cannot be evicted": len(store.records),
                "restores of nobody": len(store._queued_restores) + len(store._inflight_restores),
                "slots in use": manager.num_per_req_cache_groups - manager.state.num_free(),
                "states of loads": len(states._loading) + len(states._loaded),
                "units": len(manager.kv._raw_unit_owner),
            }
        )
        return [*super().leaks(), *(f"{number} {what}" for what, number in rest.items() if number)]


def hashes_of_answers_wait_for_their_step(engine):
    """The fault of ATOM's that `mends.hashes_of_answers_wait_for_a_token` mends, for states: they are exact where a
    step has just decoded the request, and after a prefill of others lack the last token, as its block does.
    """
    hash_blocks = engine.manager.hash_decode_blocks

    def hash_what_is_computed(seq, committed, **said):
        if seq.id in engine.decoded:
            hash_blocks(seq, committed, **said)
        else:
            hash_blocks(seq, committed - 1)

    engine.manager.hash_decode_blocks = hash_what_is_computed


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    name, requests, seed = (*sys.argv[1:], "1000", "1")[:3] if len(sys.argv) < 4 else sys.argv[1:]
    variant: Variant = {"control": CONTROL, **STATE_VARIANTS}[name]
    print(simulate(variant, int(requests), int(seed), StateSimulation))
