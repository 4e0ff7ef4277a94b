"""RadixDevice: pages of chunks that part, splits under a hold, pages given back, and mistakes of an author."""

from itertools import islice
from unittest.mock import patch

import pytest

from cpu_prefix_cache.deciding import RadixDevice
from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError
from tests.support.radix_trial import Host, RadixTrial

A, B, C = (bytes([each]) * 16 for each in b"ABC")


@pytest.fixture
def trial():
    """Pages of one token, chunks of two."""
    return RadixTrial(8, 2)


def serve(trial, keys, tokens):
    """A request with these tokens, computed and not ended."""
    request = trial.take(keys, 0, tokens)
    trial.computed(request, len(keys))
    return request


def test_only_the_last_page_of_a_chunk_is_its_own(trial):
    first, second = serve(trial, [A], [1, 2]), serve(trial, [B], [1, 3])
    assert trial.device.find(A) == [0, 1]
    assert trial.device.find(B) == [0, 3]
    trial.free(first)
    trial.free(second)
    assert list(trial.device.soonest_evicted()) == [
        *((page, None) for page in (4, 5, 6, 7, 2)),
        (1, A),
        (3, B),
        (0, None),
    ]
    trial.cache.evict(1)
    assert trial.device.find(A) is None
    assert trial.device.find(B) == [0, 3]


def test_a_hold_survives_a_split(trial):
    trial.free(serve(trial, [A, C], [1, 2, 3, 4]))
    hold = trial.device.hold([0, 1, 2, 3])
    trial.free(serve(trial, [B], [1, 3]))
    assert trial.device.num_waiting == 4, "four pages are held; the second request's copy of the first is free again"
    trial.device.release(hold)
    assert trial.device.num_waiting == 8


def test_pages_that_a_load_fills_are_free_when_it_has_ended(trial):
    request = trial.take([A], 0, [1, 2])
    once, twice = trial.device.hold([0, 1]), trial.device.hold([1])
    trial.free(request)
    assert trial.cache.free_pages == [2, 3, 4, 5, 6, 7]
    trial.device.release(once)
    assert trial.cache.free_pages == [2, 3, 4, 5, 6, 7, 0]
    trial.device.release(twice)
    assert trial.device.num_waiting == 8


def test_pages_may_be_counted_from_one():
    trial = RadixTrial(4, 1)
    trial.cache.free_pages = [1, 2, 3, 4]
    serve(trial, [A, B], [1, 2])
    assert trial.device.find_all([A, B]) == [[1], [2]]


def test_keys_beyond_the_pages_are_left_for_later(trial):
    request = serve(trial, [A], [1, 2])
    trial.device.keyed([A, B], request.pages)
    assert trial.device.find(B) is None


@pytest.mark.parametrize(("num_pages", "chunk_pages"), [(8, 0), (0, 1), (8.0, 1), (8, True)])
def test_a_device_of_nothing_is_refused(num_pages, chunk_pages):
    with pytest.raises(ConfigurationError, match="chunk_pages is the tokens of a chunk"):
        RadixDevice.__init__(RadixTrial(8, 1).device, num_pages, chunk_pages)


def test_keys_are_bytes(trial):
    with pytest.raises(MisuseError, match="keys are bytes, got 7"):
        serve(trial, [7], [1, 2])


def test_pages_that_were_never_placed(trial):
    with pytest.raises(MisuseError, match=r"page 4 is in no node: .* call placed\(node\)"):
        trial.device.keyed([A], [4, 5])


def test_pages_that_are_not_those_of_the_tree(trial):
    serve(trial, [A], [1, 2])
    with pytest.raises(MisuseError, match="the whole prefix, in token order"):
        trial.device.keyed([A], [2, 3])


def test_pages_below_a_node_that_was_never_placed(trial):
    with patch.object(trial.device, "placed"):
        upper, _ = trial.cache.insert([1, 2], trial.cache.allocate(2))
    trial.cache.insert([1, 2, 3], [0, 1, *trial.cache.allocate(1)])
    with pytest.raises(MisuseError, match=r"the tree has \[2\] up to the last"):
        trial.device.check_path([0, 1, 2])
    trial.device.placed(upper)
    for pages in ([0], [0, 1, 2]):
        trial.device.check_path(pages)


def test_pages_that_left_the_tree_unheard(trial):
    trial.free(serve(trial, [A], [1, 2]))
    trial.device.evicted = lambda pages: None
    trial.cache.evict(2)
    with pytest.raises(MisuseError, match=r"page 0 is free and in a node: call evicted\(pages\)"):
        list(trial.device.soonest_evicted())
    trial.cache.free_pages.sort()
    with pytest.raises(MisuseError, match="page 1 is the last of another chunk"):
        serve(trial, [B], [3, 4])


def test_pages_that_are_freed_under_a_load(trial):
    request = trial.take([A], 0, [1, 2])
    trial.device.hold(request.pages)
    trial.cache.free(request.pages)
    with pytest.raises(MisuseError, match="a load is writing to it"):
        list(trial.device.soonest_evicted())


def test_pages_that_are_inserted_under_a_load(trial):
    request = trial.take([A], 0, [1, 2])
    trial.device.hold(request.pages)
    with pytest.raises(MisuseError, match="insert them when end_step has named the request"):
        trial.computed(request, 1)


def test_pages_that_a_load_must_not_fill(trial):
    request, other = trial.take([A], 0, [1, 2]), serve(trial, [B], [3, 4])
    trial.device.check_own(request.pages)
    for pages, why in (([1, 7], "page 7 is free"), (other.pages, "page 2 is in the tree")):
        with pytest.raises(MisuseError, match=why):
            trial.device.check_own(pages)
    trial.device.hold(request.pages)
    with pytest.raises(MisuseError, match="page 0 is being filled by another load"):
        trial.device.check_own(request.pages)


class Asked(Host):
    """Counts its reads of the tree's nodes."""

    asked = 0

    def __getattribute__(self, name):
        if name in ("last_use", "locks", "parent"):
            self.asked += 1
        return super().__getattribute__(name)


def asked_of(num_nodes):
    """Number of reads of the tree for its first 64 pages, ten times, while it is used."""
    trial = RadixTrial(2 * num_nodes, 1, device=Asked)
    cache = trial.cache
    for at in range(num_nodes):
        cache.insert([at // 4, at], cache.allocate(2))
    cache.free_pages.clear()  # as in an engine that evicts on demand
    list(islice(trial.device.soonest_evicted(), 64))
    before = trial.device.asked
    for at in range(10):
        cache.match([at, 4 * at])
        held = trial.device.hold([page for page, _ in islice(trial.device.soonest_evicted(), 64)][:8])
        cache.evict(8)
        cache.free_pages.clear()
        trial.device.release(held)
    return trial.device.asked - before


def test_a_question_costs_what_is_read_however_large_the_tree_is():
    """All nodes were read each time: 264 ms with 200,000 of them."""
    few, many = asked_of(500), asked_of(4_000)
    assert few / 1.2 < many < few * 1.2


def test_the_lower_part_of_a_split_hangs_below_the_upper_one_though_only_that_is_placed(trial):
    trial.free(serve(trial, [A, C], [1, 2, 3, 4]))
    place, node_of = trial.device.placed, trial.device._node
    trial.device.placed = lambda node: None if node_of[node.pages[0]] is node else place(node)
    upper, _ = trial.cache.match([1, 2])
    upper.last_use = 0
    place(upper)
    trial.cache.free_pages.clear()
    assert [page for page, _ in trial.device.soonest_evicted()] == [3, 2, 1, 0]


def test_leaves_that_have_left_the_tree_are_forgotten_without_a_look_at_the_queue():
    trial = RadixTrial(8, 1)
    for at in range(100):
        trial.free(serve(trial, [bytes([at]) * 16], [at]))
        trial.cache.evict(1)
    assert len(trial.device._leaves) <= 2


def test_the_order_is_not_read_on_after_another_question(trial):
    """Both would take the leaves of one heap."""
    trial.free(serve(trial, [A], [1, 2]))
    trial.free(serve(trial, [C], [3, 4]))
    trial.cache.free_pages.clear()
    order = trial.device.soonest_evicted()
    assert next(order) == (1, A)
    assert len(list(trial.device.soonest_evicted())) == 4
    with pytest.raises(MisuseError, match="an earlier answer cannot be read on"):
        list(order)


def test_a_free_list_may_be_a_tensor(trial):
    torch = pytest.importorskip("torch")
    trial.device.free_pages = lambda: torch.tensor([5, 6])
    assert list(trial.device.soonest_evicted()) == [(5, None), (6, None)]
    assert trial.device.is_waiting(6, None) is True
    assert trial.device.is_waiting(7, None) is False
