"""Engines as a whole: how they begin, beside which other connectors, and that nothing is left when they are gone."""

import gc
import json
import os
import resource
import threading
import weakref
from pathlib import Path

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import Direction
from tests.vllm.real_cache import BLOCKS, PROMPTS, CachedEngine, Copies, expected_of, folder_of, ours
from tests.vllm.real_engine import BLOCK, TOLERANCE, cold_answers, differences

ALL = BLOCKS * BLOCK
LOAD, STORE = Direction.LOAD, Direction.STORE


on_two_models = pytest.mark.parametrize("model", ["llama", "gemma3"])
both_schedulers = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])

# Beside other connectors


SILENT = dict(kv_connector="SilentConnector", kv_connector_module_path="tests.vllm.silent", kv_role="kv_both")


class MultiEngine(CachedEngine):
    """`Copies` are those of the first of ours."""

    def __init__(
        self, folder: Path, *children: dict[str, object], copies: Copies | None = None, **engine: object
    ) -> None:
        multi = dict(connector="MultiConnector", module=None, extra=dict(connectors=list(children)), log_stats=True)
        super().__init__(folder, copies=copies or Copies(), engine=multi | engine)

    def loaded(self) -> list[int]:
        """How many loads each of ours has made."""
        return [half.cache.statistics().chunks_loaded for half, _ in self.halves]

    def has(self, prompt: list[int]) -> list[int]:
        """How much of a prompt each of ours has."""
        keys = self.hashes(prompt)
        return [half.cache.coordinator.longest_boundary(keys, 0, len(prompt)) for half, _ in self.halves]


@both_schedulers
@on_two_models
def test_two_of_ours_store_both_and_the_first_that_has_something_loads(model, asynchronous):
    children = ours(), ours(policy="arc")
    with MultiEngine(folder_of(model), *children, blocks=200, asynchronous=asynchronous) as engine:
        answers = engine.answer(PROMPTS)
        engine.forget()
        assert engine.has(PROMPTS[0]) == [ALL, ALL]
        answers += engine.answer(PROMPTS)
        engine.check_nothing_leaked()
        assert engine.loaded() == [8 * BLOCKS, 0]
        engine.halves[0][0].cache.reset()  # as if the first had evicted everything
        engine.forget()
        answers += engine.answer(PROMPTS)
        engine.check_nothing_leaked()
        assert engine.loaded() == [8 * BLOCKS, 8 * BLOCKS]
        engine.forget()
        assert engine.has(PROMPTS[0]) == [ALL, ALL]  # the first has stored anew what the second has brought
        answers += engine.answer(PROMPTS)
        engine.check_nothing_leaked()
    assert max(differences(answers, expected_of(model) * 4)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0] * 8 + [ALL] * 24


@on_two_models
def test_a_lazy_one_and_an_eager_one_share_a_device(model):
    """Both hold blocks of it while they store. The lazy one puts back what waits to be evicted where it was."""
    with MultiEngine(folder_of(model), ours(offload="lazy"), ours()) as engine:
        answers = []
        for prompt in PROMPTS * 2:
            answers += engine.answer([prompt])
        engine.flood()
        assert engine.has(PROMPTS[0]) == [ALL, ALL]
        answers += engine.answer(PROMPTS)
        engine.check_nothing_leaked()
    assert max(differences(answers, expected_of(model) * 3)) <= TOLERANCE


@on_two_models
def test_if_one_of_ours_fails_to_load_the_other_does(model):
    with MultiEngine(folder_of(model), ours(), ours(), blocks=200) as engine:
        answers = engine.answer(PROMPTS[:1])
        engine.forget()
        with engine.copies.failing(LOAD):
            answers += engine.answer(PROMPTS[:1])
        engine.check_nothing_leaked()
        assert engine.loaded() == [0, BLOCKS]
    assert max(differences(answers, expected_of(model)[:1] * 2)) <= TOLERANCE
    assert answers[1].loaded_tokens == ALL


@on_two_models
def test_a_load_of_one_that_moves_is_not_stored_by_the_other(model):
    """To the other the request looks as if all of it had been computed already, before its bytes are there."""
    with MultiEngine(folder_of(model), ours(), ours(), blocks=200) as engine:
        answers = engine.answer(PROMPTS[:1])
        engine.halves[1][0].cache.reset()
        engine.forget()
        with engine.copies.holding(LOAD):
            name = engine.submit(PROMPTS[0])
            engine.step_until(lambda: LOAD in engine.copies.begun)
            for _ in range(20):
                engine.step()
            assert engine.halves[1][0].cache.statistics().storing == 0
            assert engine.has(PROMPTS[0]) == [ALL, 0]
        engine.rest()
        answers.append(engine.finished.pop(name))
        engine.halves[0][0].cache.reset()
        engine.forget()
        answers += engine.answer(PROMPTS[:1])  # from the other
        engine.check_nothing_leaked()
    assert max(differences(answers, expected_of(model)[:1] * 3)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0, ALL, ALL]


@pytest.mark.parametrize("order", ["first", "last"])
@on_two_models
def test_beside_a_connector_that_never_has_anything(model, order):
    children = [ours(), SILENT] if order == "first" else [SILENT, ours()]
    with MultiEngine(folder_of(model), *children, blocks=200) as engine:
        answers = engine.answer(PROMPTS)
        engine.forget()
        name = engine.submit(PROMPTS[0])
        engine.step()
        engine.abort(name)
        answers += engine.answer(PROMPTS)
        engine.check_nothing_leaked()
        engine.forget(host=True)
        answers += engine.answer(PROMPTS)
    assert max(differences(answers, expected_of(model) * 3)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0] * 8 + [ALL] * 8 + [0] * 8


def test_beside_a_connector_that_knows_one_group_only(tmp_path):
    """vLLM's example, which writes files. It calls for `request_finished` in place of that for all groups."""
    example = dict(kv_connector="ExampleConnector", kv_role="kv_both")
    example |= dict(kv_connector_extra_config=dict(shared_storage_path=str(tmp_path)))
    options = dict(blocks=200, disable_hybrid_kv_cache_manager=True)
    with MultiEngine(folder_of("llama"), ours(), example, **options) as engine:
        answers = engine.answer(PROMPTS)
        engine.forget()
        answers += engine.answer(PROMPTS)
        engine.check_nothing_leaked()
    assert max(differences(answers, expected_of("llama") * 2)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [0] * 8 + [ALL] * 8
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize("group", ["window-0", "window-1", "prefix-2"])
def test_one_damaged_block_of_a_load_shows(group):
    """The control: the first loads, and is damaged; the second has stored what is right."""
    with MultiEngine(folder_of("gemma3"), ours(), ours(), copies=Copies(damaged=group), blocks=200) as engine:
        engine.answer(PROMPTS)
        engine.forget()
        damaged = engine.answer(PROMPTS)
    assert [answer.loaded_tokens for answer in damaged] == [ALL] * 8
    assert sum(difference > TOLERANCE for difference in differences(damaged, expected_of("gemma3"))) >= 7


# How they begin


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (dict(speed="fast"), "unknown option 'speed'; known options are cpu_bytes_to_use, "),
        (dict(cpu_bytes_to_use=2**60), r"GiB|GB"),
    ],
)
def test_options_are_refused_with_a_sentence_that_helps(said, answer):
    with pytest.raises(ConfigurationError, match=answer):
        CachedEngine(folder_of("llama"), **said)


def test_without_prefix_caching_there_is_nothing_to_do(log):
    with CachedEngine(folder_of("llama"), engine=dict(enable_prefix_caching=False, blocks=200)) as engine:
        answers = engine.answer(PROMPTS) + engine.answer(PROMPTS)
        assert engine.half is None
        engine.rest()
        assert not engine.scheduler.has_requests()
    assert "prefix caching is off, so the host prefix cache is off" in log.text
    assert max(differences(answers, expected_of("llama") * 2)) <= TOLERANCE
    assert [answer.cached_tokens for answer in answers] == [0] * 16


def test_blocks_of_another_length():
    """64 tokens; what is loaded ends at multiples of them."""
    with CachedEngine(folder_of("gemma3"), offload="eager", engine=dict(block_tokens=2 * BLOCK)) as engine:
        answers = engine.answer(PROMPTS[:2])
        engine.forget()
        answers += engine.answer(PROMPTS[:2])
        engine.check_nothing_leaked()
    assert (
        max(differences(answers, cold_answers(folder_of("gemma3"), PROMPTS[:2], block_tokens=2 * BLOCK) * 2))
        <= TOLERANCE
    )
    assert [answer.loaded_tokens for answer in answers] == [0, 0, ALL, ALL]


# Leftovers

HOST_BYTES = 2**28  # of which every page is written


FOLDER = Path(f"/dev/shm/cpu-prefix-cache-{os.geteuid()}")


def left_behind() -> tuple[list[str], list[str], list[str]]:
    """Threads, files of shared memory, and open files that are not there in a process without an engine.

    What stays is the user's folder for claims of memory, without a claim of this process.
    """
    threads = [thread.name for thread in threading.enumerate() if thread.name.split("-")[0] in ("store", "load")]
    shared = [name for name in os.listdir("/dev/shm") if "cpu-prefix-cache" in name and name != FOLDER.name]
    claims = (path for path in FOLDER.glob("*") if path.name != "lock")
    shared += [path.name for path in claims if os.getpid() in json.loads(path.read_text().partition("\n")[2])]
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "cpu-prefix-cache" in line]
    return threads, shared, mapped


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def live_once(folder, copies=None) -> list[weakref.ref]:
    """An engine that has answered, with a host region that has been used, and things it is not to leave behind."""
    with CachedEngine(folder, offload="eager", host_bytes=HOST_BYTES, copies=copies) as engine:
        worker = engine.connectors.worker.worker
        assert len(left_behind()[0]) == 2
        engine.answer(PROMPTS[:2])
        arena = worker._worker._arena
        arena.blocks.fill_(1)
        return [weakref.ref(each) for each in (arena, worker, engine.cache)]


@on_two_models
def test_one_engine_after_another_leaves_nothing_behind(model):  # S7.44
    live_once(folder_of(model))  # what vLLM keeps for good, and the allocator
    before = resident_bytes()
    for _ in range(2):
        remains = live_once(folder_of(model))
        gc.collect()
        assert [each() for each in remains] == [None, None, None]
        assert left_behind() == ([], [], [])
    assert resident_bytes() - before < HOST_BYTES / 4


@both_schedulers
@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_an_engine_can_end_while_something_is_copied_and_twice(direction, asynchronous):  # S7.44
    """It waits for what has begun, as the copier's memory must not go before that."""
    options = dict(asynchronous=asynchronous)
    with CachedEngine(folder_of("llama"), offload="eager", copies=Copies(), engine=options) as engine:
        engine.answer(PROMPTS[:2])
        engine.forget()
        with engine.copies.holding(direction):
            engine.submit(PROMPTS[0] if direction is LOAD else PROMPTS[3])
            begun = engine.copies.count(direction)
            engine.step_until(lambda: engine.copies.count(direction) > begun)
        worker = engine.connectors.worker
        worker.shutdown()
        worker.shutdown()
        assert left_behind() == ([], [], [])
    engine.close()
    with CachedEngine(folder_of("llama"), offload="eager") as engine:
        assert len(engine.answer(PROMPTS[:1])) == 1


def test_an_engine_that_is_refused_leaves_nothing_behind():
    with pytest.raises(ConfigurationError, match="policy must be one of"):
        CachedEngine(folder_of("llama"), policy="nobody", host_bytes=HOST_BYTES)
    gc.collect()
    assert left_behind() == ([], [], [])


def test_host_memory_that_is_not_used_is_not_taken():
    """A region of 16 times what is stored: pages come when they are written."""
    with CachedEngine(folder_of("llama"), offload="eager", host_bytes=2**30) as engine:
        before = resident_bytes()
        engine.answer(PROMPTS)
        engine.rest()
        assert engine.statistics.bytes_stored > 2**22
        assert resident_bytes() - before < 2**28
