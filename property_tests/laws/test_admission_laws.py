"""Admission against a list that is searched from end to end."""

from hypothesis import example, given
from hypothesis import strategies as st

from cpu_prefix_cache.deciding import BlockPool, CacheOptions
from cpu_prefix_cache.pool.admission import Admission
from property_tests.strategies import chain, prompts

requests = st.lists(prompts, max_size=12)


class Memory:
    """Keys of prompts, as pairs of a key and how often, the one seen longest ago first."""

    def __init__(self, remembered: int) -> None:
        self.remembered = remembered
        self.pairs: list[tuple[bytes, int]] = []

    def told(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            times = self.times(key)
            self.pairs = [pair for pair in self.pairs if pair[0] != key] + [(key, times + 1)]
        self.pairs = self.pairs[-self.remembered :]

    def times(self, key: bytes) -> int:
        return dict(self.pairs).get(key, 0)


@given(requests, prompts, st.integers(1, 3), st.integers(0, 6), st.integers(1, 12))
@example(["abc", "xyz"], "abc", 1, 0, 4)  # of the older prompt the end is forgotten
def test_admission_is_a_bounded_memory_of_long_enough_prompts(told, asked, store_after, min_tokens, remembered):
    options = CacheOptions(store_after=store_after, min_store_tokens=min_tokens)
    admission, memory = Admission(options, remembered), Memory(remembered)
    for prompt in told:
        admission.told(chain(prompt), len(prompt))
        if len(prompt) >= min_tokens:
            memory.told(chain(prompt))
        assert len(admission) == len(memory.pairs) <= remembered
    enough = [memory.times(key) >= store_after for key in chain(asked)]
    assert enough == sorted(enough, reverse=True), "what is below was seen more often than what is above it"
    assert admission.admitted(chain(asked)) == sum(enough)


@given(requests, prompts, st.integers(1, 3), st.integers(0, 6))
def test_a_pool_accepts_what_is_admitted_and_no_more(told, asked, store_after, min_tokens):
    pool = BlockPool(200, thresholds=CacheOptions(store_after=store_after, min_store_tokens=min_tokens))
    for prompt in told:
        pool.touch(None, chain(prompt), 0.0, len(prompt))
    long = [chain(prompt) for prompt in told if len(prompt) >= min_tokens]
    counts = [sum(key in keys for keys in long) for key in chain(asked)]
    off = store_after == 1 and not min_tokens
    assert pool.choose(pool.root, chain(asked)) == (len(asked) if off else sum(n >= store_after for n in counts))
