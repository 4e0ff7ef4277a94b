"""Requests of all kinds, at once, in vLLM's CPU offloading manager with our policies, whatever goes wrong.

After each call every rule holds, and the manager has exactly what a model has: a set of keys that grows by what was to
be stored, and shrinks by what left, failed or was reset.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from vllm.v1.kv_offload.base import LookupResult

from tests.vllm.offloading import POLICIES, Prompt, managed, policy_of

TEXTS = st.text("ab", min_size=1, max_size=8)


class Requests(RuleBasedStateMachine):
    prompts = Bundle("prompts")
    stores = Bundle("stores")
    loads = Bundle("loads")

    @initialize(policy=st.sampled_from(POLICIES), capacity=st.integers(1, 12), threshold=st.sampled_from([0, 2]))
    def begin(self, policy, capacity, threshold):
        self.manager = managed(capacity, policy, store_threshold=threshold)
        self.capacity = capacity
        self.here: dict[bytes, LookupResult] = {}
        self.used: list[bytes] = []
        self.resets = 0

    @rule(target=prompts, text=TEXTS, groups=st.integers(1, 2))
    def submit(self, text, groups):
        return Prompt(self.manager, text, groups)

    @rule(target=stores, prompt=prompts, start=st.integers(0, 7), length=st.integers(1, 8))
    def store(self, prompt, start, length):
        keys = prompt.chunks(start, min(start + length, len(prompt.text)))
        before = dict(self.here)
        stored = self.manager.prepare_store(keys, prompt.context)
        if stored is None:
            assert self.here == before
            return multiple()
        for gone in stored.evicted_keys:
            assert gone not in self.used
            assert gone not in keys
            assert self.here.pop(gone) is LookupResult.HIT
        self.here |= dict.fromkeys(stored.keys_to_store, LookupResult.HIT_PENDING)
        return (self.resets, prompt, set(stored.keys_to_store)) if stored.keys_to_store else multiple()

    @rule(store=consumes(stores), succeeds=st.booleans())
    def end_store(self, store, succeeds):
        resets, prompt, keys = store
        if resets < self.resets:
            return
        self.manager.complete_store(keys, prompt.context, success=succeeds)
        for key in keys:
            if succeeds:
                self.here[key] = LookupResult.HIT
            else:
                del self.here[key]

    @rule(target=loads, prompt=prompts)
    def load(self, prompt):
        hit = prompt.hit if prompt.groups == 1 else 0
        if not hit:
            return multiple()
        keys = prompt.chunks(0, hit)
        self.manager.prepare_load(keys, prompt.context)
        self.used += keys
        return self.resets, prompt, keys

    @rule(load=consumes(loads))
    def end_load(self, load):
        resets, prompt, keys = load
        if resets == self.resets:
            self.manager.complete_load(keys, prompt.context)
            for key in keys:
                self.used.remove(key)

    @rule(prompt=consumes(prompts))
    def end(self, prompt):
        prompt.end()

    @rule()
    def reset(self):
        self.manager.reset_cache()
        self.resets += 1
        self.here.clear()
        self.used.clear()

    @invariant()
    def every_rule_holds(self):
        policy_of(self.manager).check_valid()
        assert {*policy_of(self.manager)._kept.chunks} == self.here.keys()
        for key, found in self.here.items():
            assert self.manager.lookup(key, None) is found


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
