"""The dictionaries of the key index: of a size that takes little memory, and that is quickly rebuilt."""

import random
import sys
from collections import Counter

import pytest

from cpu_prefix_cache.index.shards import MOST_KEYS, distinct, new_shards


@pytest.mark.parametrize("num_keys", [3_000, 11_000, 45_000])
def test_keys_that_come_and_go_take_little_memory(num_keys):
    """With one for each first byte they take 90, 97 and 100 bytes each."""
    rng, shards = random.Random(num_keys), new_shards(num_keys)
    keys = [rng.randbytes(16) for _ in range(4 * num_keys)]
    for at, key in enumerate(keys):
        if at >= num_keys:
            last = keys[at - num_keys]
            del shards[last[0]][last]
        shards[key[0]][key] = at
    assert sum(len(shard) for shard in distinct(shards)) == num_keys
    assert sum(map(sys.getsizeof, distinct(shards))) <= 66 * num_keys


@pytest.mark.parametrize("num_keys", [1, 64, 700_000, 1_000_000, 2_000_000, 8_000_000])
def test_no_dictionary_has_more_keys_than_are_quickly_rebuilt(num_keys):
    first_bytes = Counter(map(id, new_shards(num_keys)))
    assert sum(first_bytes.values()) == 256 and num_keys * max(first_bytes.values()) / 256 <= MOST_KEYS
