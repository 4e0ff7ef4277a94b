"""Stores with pieces that do not fit their codec: what comes before the first of them is kept, and the rest counted.

Chunks are letters; a rank reports pieces by their first host blocks.
"""

import pytest

from cpu_prefix_cache.offload import completion
from cpu_prefix_cache.testing.engine import Engine
from tests.support.story import whole_prompts


def stored(engine, prompt="abcd"):
    """The store of a prompt that was computed, and the host blocks of its chunks."""
    engine.starts("r", prompt)
    engine.computes("r")
    (transfer,) = engine.steps().transfers
    return transfer.id, transfer.copies[0].host_blocks


def lands(engine, id, unfit, rank=0):
    return engine.reports([id], rank=rank, unfit=((id, tuple(unfit)),))


@pytest.mark.parametrize(("first", "kept"), [(0, set()), (1, {"a"}), (2, {"a", "ab"}), (3, {"a", "ab", "abc"})])
def test_chunks_before_the_first_are_kept(first, kept):
    engine = Engine()
    id, blocks = stored(engine)
    assert [each.ok for each in lands(engine, id, blocks[first:])] == [True]
    assert engine.host == kept
    now = engine.cache.statistics()
    assert (now.chunks_stored, now.store_unfit, now.store_cancelled, now.stores_failed) == (first, 4 - first, 0, 0)
    engine.ends("r")
    engine.copies()
    engine.device_forgets()
    assert engine.is_at_rest()


@pytest.mark.parametrize("others", [[], [3]])
def test_the_report_of_one_rank_is_enough(others):
    engine = Engine(ranks=2)
    id, blocks = stored(engine)
    assert lands(engine, id, [blocks[2]], rank=1) == []
    lands(engine, id, [blocks[at] for at in others], rank=0)
    assert engine.host == {"a", "ab"}


def test_blocks_of_another_store_do_not_count():
    """Stores that were submitted as one have one event."""
    engine = Engine()
    id, blocks = stored(engine)
    lands(engine, id, [max(blocks) + 1])
    assert engine.host == {"a", "ab", "abc", "abcd"} and engine.cache.statistics().store_unfit == 0


def test_a_store_below_it_is_cancelled():
    engine = Engine()
    engine.starts("r", "abcd")
    first, second = engine.stores_chunk_by_chunk("r", 4)[1:3]
    engine.reports(done=[0])
    block = engine.transfer(first).nodes[0]
    engine.reports(done=[second])
    lands(engine, first, [block])
    assert engine.host == {"a"}
    now = engine.cache.statistics()
    assert now.store_unfit == 1 and now.store_cancelled >= 1


def test_a_store_that_is_reported_with_the_one_it_follows():
    """The latter would commit both."""
    engine = Engine()
    engine.starts("r", "abcd")
    first, second = engine.stores_chunk_by_chunk("r", 4)[:2]
    unfit = (second, tuple(engine.transfer(second).nodes))
    engine.reports([first, second], unfit=(unfit,))
    assert engine.host == {"a"} and engine.cache.statistics().store_unfit == 1


def test_many_of_them_are_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(completion, "MANY_UNFIT", 3)
    engine = Engine(host=64, device=64)
    for prompt in ("abc", "defg", "hijk"):
        engine.starts(prompt, prompt)
        engine.computes(prompt)
        (transfer,) = engine.steps().transfers
        assert len(caplog.records) == (prompt == "hijk")
        lands(engine, transfer.id, transfer.copies[0].host_blocks[:1])
    (record,) = caplog.records
    assert record.getMessage().startswith("7 chunks were not stored, and 0 were: their bytes do not fit their codec")


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_bytes_that_do_not_fit_are_copied_once(mode):
    """Not again with each chunk that its request adds, nor when that ends. (Lazy stores what runs on a full device.)"""
    options = {} if mode == "eager" else {"cache": whole_prompts}
    engine = Engine(mode, device=6, **options)
    engine.starts("r", "abcdef")
    engine.computes("r", 2)
    (transfer,) = engine.steps().transfers
    lands(engine, transfer.id, transfer.copies[0].host_blocks[1:])
    for chunks in (3, 4, 5, 6):
        engine.computes("r", chunks)
        assert engine.copies() == []
    engine.ends("r")
    assert engine.copies() == [] and engine.host == {"a"}


def test_chunks_that_are_computed_again_are_tried_again():
    engine = Engine()
    id, blocks = stored(engine, "ab")
    lands(engine, id, blocks[1:])
    engine.ends("r")
    engine.device_forgets()
    engine.starts("again", "ab", load=False)
    engine.computes("again")
    assert engine.copies() == ["ab"] and engine.host == {"a", "ab"}


def test_a_store_that_failed_for_it_is_no_failure_of_the_link_and_is_not_tried_again():
    """ATOM's ranks can say of a store only whether all of it is there."""
    engine = Engine(device=64, host=64)
    for prompt in "abcdefgh":
        engine.starts(prompt, prompt)
        engine.computes(prompt)
        (store,) = engine.steps().transfers
        unfit = ((store.id, store.copies[0].host_blocks),)
        engine.reports(failed=[store], unfit=unfit)
        engine.ends(prompt)
        assert engine.copies() == []
    assert engine.host == set() and not engine.cache.is_off and engine.cache.statistics().store_cancelled == 8
