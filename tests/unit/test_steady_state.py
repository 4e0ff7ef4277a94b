"""Nothing grows with the number of requests served (S7.40, L5.27: "tombstones bounded")."""

from itertools import product

import pytest

from cpu_prefix_cache.pool.block_pool import BlockPool
from cpu_prefix_cache.testing.engine import Engine
from tests.support.sizes import sizes_of_containers


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_thousand_requests_leave_what_five_hundred_left(mode):
    engine = Engine(mode, device=12, host=20, max_tokens=8)
    prompts = ["".join(letters) for letters in product("abcdefghijklm", repeat=3)][:1_000]
    seen = []
    for number, prompt in enumerate(prompts, 1):
        engine.starts(prompt, prompt)
        engine.copies()
        engine.computes(prompt)
        engine.copies()
        engine.ends(prompt)
        engine.requests.clear()
        engine.copies()
        if number % 500 == 0:
            for _ in range(10):
                engine.copies()
            assert engine.is_at_rest()
            seen.append(sizes_of_containers(engine.cache))
    first, second = seen
    grown = {where: (first.get(where, 0), size) for where, size in second.items() if size > first.get(where, 0) + 2}
    assert not grown
    assert sum(second.values()) < 1_000


def test_the_measure_itself_sees_into_a_pool():
    pool = BlockPool(4)
    before = sum(sizes_of_containers(pool).values())
    pool.commit(pool.allocate(2), [b"a", b"ab"], pool.root, pool.touch(None))
    assert sum(sizes_of_containers(pool).values()) > before
