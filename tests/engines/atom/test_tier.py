"""A tier of files under ATOM's real scheduler: what comes back from it, and what becomes of requests that wait for it.

Every engine of a test finds the same folder; one that is made after another is closed is the next process. Bytes are
compared as everywhere in engine.py. The control changes what blocks on disk hold and makes their records fit.
"""

import os
import time
from types import SimpleNamespace

import pytest

from tests.engines.atom.source import WHY_NOT_REAL
from tests.support.tier_refusals import REFUSED

if WHY_NOT_REAL:
    pytest.skip(WHY_NOT_REAL, allow_module_level=True)

from atom.kv_transfer.disaggregation import KVOutputAggregator
from atom.kv_transfer.disaggregation.types import ConnectorCompletion, KVConnectorOutput

from connector.atom.geometry import CHANNEL
from connector.atom.settings import Settings
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import RankReport
from cpu_prefix_cache.messages.tier import TierReport
from cpu_prefix_cache.model.planner import PAGE_BYTES
from cpu_prefix_cache.slab import opening
from cpu_prefix_cache.slab.generations import MARK
from cpu_prefix_cache.tiers import promotions
from cpu_prefix_cache.tiers.tier_cache import PAUSE_SECONDS
from tests.engines.atom.engine import Engine
from tests.engines.atom.tiered import Gate, TieredEngine, config_over, damage

PATIENCE = 30.0  # seconds: deadlines are of tens of milliseconds, and this machine may be busy
PROMPTS = [list(range(at, at + 41)) for at in range(0, 800, 100)]  # ten blocks each
BLOCKS = 10


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "tier"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(promotions, "PENDING_GRACE_SECONDS", PATIENCE)


@pytest.fixture
def reads(monkeypatch):
    gate = Gate(os.preadv)
    monkeypatch.setattr(os, "preadv", gate)
    yield gate
    gate.open()


def write_prompts(path, prompts=PROMPTS, **said):
    """Chunks that a process, which ends then, leaves in the files. Returns their number."""
    with TieredEngine(config_over(path, **said)) as engine:
        for prompt in prompts:
            engine.serve(prompt)
        engine.check_at_rest()
        return engine.below.cache.chunks_stored


def loaded(seqs):
    return [seq.prefix_cache_hit_tokens for seq in seqs]


# Hits


@pytest.mark.parametrize("defers", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize(("offload", "below"), [("lazy", "lazy"), ("eager", "lazy"), ("lazy", "eager")])
def test_chunks_that_device_and_host_have_evicted_come_from_the_files(path, offload, below, defers):
    """Eight prompts of ten blocks; the device has room for two, the host for four."""
    with TieredEngine(config_over(path, offload=offload, tier={"offload": below}), defers=defers) as engine:
        for prompt in PROMPTS * 2:
            engine.serve(prompt, 2)
        assert engine.below.hit_tokens >= 4 * 40 and engine.below.cache.chunks_loaded > 0
        engine.check_at_rest()


def test_an_eager_tier_writes_what_the_host_has_and_a_lazy_one_what_it_will_evict(path):
    """The host has room for four of these prompts."""
    assert write_prompts(path, PROMPTS[:1], tier={"offload": "eager"}) == BLOCKS
    assert write_prompts(path, PROMPTS[1:2], tier={"offload": "lazy"}) == 0


RANKS = dict(ranks=2)
SHARED_CONTEXT = dict(ranks=2, decode_context_parallel_size=2)


@pytest.mark.parametrize("parallel", [{}, RANKS, SHARED_CONTEXT], ids=["one rank", "two ranks", "shared contexts"])
def test_the_next_process_finds_what_this_one_wrote(path, parallel):
    blocks = 5 if parallel is SHARED_CONTEXT else BLOCKS
    assert write_prompts(path, **parallel) == blocks * len(PROMPTS)
    with TieredEngine(config_over(path, **parallel)) as engine:
        assert engine.below.found == blocks * len(PROMPTS)
        assert loaded(map(engine.serve, PROMPTS)) == [40] * len(PROMPTS)
        assert engine.below.hit_tokens == 40 * len(PROMPTS)
        engine.check_at_rest()


def test_requests_that_wait_at_once_are_all_served(path):
    write_prompts(path)
    with TieredEngine(config_over(path, device_blocks=96)) as engine:
        seqs = [engine.add(prompt, 2) for prompt in PROMPTS + PROMPTS[:2]]
        engine.rest()
        assert engine.below.hit_tokens >= 40 * len(PROMPTS) // 2  # a quarter of the host is promoted at a time
        assert all(len(engine.outputs[seq.id]) == 2 for seq in seqs)
        engine.check_at_rest()


def test_a_prompt_whose_beginning_the_device_has_loads_the_rest(path):
    write_prompts(path)
    with TieredEngine(config_over(path)) as engine:
        engine.serve(PROMPTS[0][:21])
        before = engine.below.cache.bytes_loaded
        assert engine.serve(PROMPTS[0]).prefix_cache_hit_tokens == 40
        assert engine.below.cache.bytes_loaded - before <= 5 * 4096  # what device and host have is not read
        engine.check_at_rest()


def test_chunks_on_the_device_are_not_requested_from_the_tier(path):
    """Lazy: the host has nothing of it, the tier has all of it."""
    write_prompts(path)
    with TieredEngine(config_over(path, offload="lazy")) as engine:
        engine.serve(PROMPTS[0])
        asked = engine.below.asked
        assert engine.serve(PROMPTS[0]).prefix_cache_hit_tokens == 40
        assert engine.below.asked == asked
        engine.check_at_rest()


def test_a_request_that_loads_nothing_needs_nothing_of_the_tier(path):
    write_prompts(path)
    with TieredEngine(config_over(path)) as engine:
        seq = engine.serve(PROMPTS[0], kv_transfer_params={"cpu_prefix_cache_load": False})
        assert (seq.prefix_cache_hit_tokens, engine.below.asked) == (0, 0)
        engine.check_at_rest()


# Wrong bytes


@pytest.mark.parametrize("parallel", [{}, RANKS], ids=["one rank", "two ranks"])
def test_damage_that_no_checksum_sees_is_read(path, parallel):
    """The control of all comparisons in this file. S5.30."""
    write_prompts(path, **parallel)
    damage(path, is_sealed=True, ranks=parallel.get("ranks", 1))
    with TieredEngine(config_over(path, **parallel)) as engine:
        engine.serve(PROMPTS[0])
        assert engine.below.hit_tokens == 40 and engine.counts.wrong


@pytest.mark.parametrize(
    ("parallel", "rank"), [({}, 0), (RANKS, 0), (RANKS, 1)], ids=["one rank", "the first of two", "the second of two"]
)
def test_damaged_blocks_are_refused_and_computed(path, parallel, rank):
    write_prompts(path, **parallel)
    damage(path, is_sealed=False, rank=rank, ranks=parallel.get("ranks", 1))
    with TieredEngine(config_over(path, **parallel)) as engine:
        assert loaded(map(engine.serve, PROMPTS)) == [0] * len(PROMPTS)
        assert engine.below.refused >= len(PROMPTS) and engine.below.hit_tokens == 0
        assert engine.below.cache.loads_failed == 0  # a refused slot is a miss (rule 15)
        engine.check_at_rest()


@pytest.mark.parametrize("rank", [0, 1])
def test_chunks_before_a_damaged_block_are_kept(path, rank):
    """On one rank of two the last three blocks of a prompt are damaged: the load is shorter than was hoped for."""
    write_prompts(path, PROMPTS[:1], ranks=2)
    assert damage(path, is_sealed=False, rank=rank, ranks=2, after=7) == 3
    with TieredEngine(config_over(path, ranks=2)) as engine:
        assert engine.serve(PROMPTS[0]).prefix_cache_hit_tokens == 28
        assert engine.serve(PROMPTS[0]).prefix_cache_hit_tokens == 40  # computed, and stored again
        engine.check_at_rest()


# Waiting


def parked(engine, reads, tokens):
    """A request whose promotion is being read, and does not end before the gate opens."""
    reads.shut()
    seq = engine.add(tokens, 2)
    while not reads.waiting:
        engine.step()
    assert [id for id, live in engine.connector._live.items() if not live.is_admitted] == [seq.id]
    return seq


def test_a_request_waits_while_others_go_on(path, reads):
    write_prompts(path)
    with TieredEngine(config_over(path)) as engine:
        seq = parked(engine, reads, PROMPTS[0])
        other = engine.add(range(900, 920), 2)
        while other.id not in engine.outputs:
            engine.step()
        assert seq.id not in engine.outputs
        reads.open()
        engine.rest()
        assert seq.prefix_cache_hit_tokens == 40
        engine.check_at_rest()


@pytest.mark.parametrize("is_seen_first", [False, True], ids=["queued", "rejected"])
def test_a_request_that_is_aborted_while_it_waits_gives_its_blocks_back_at_once(path, reads, is_seen_first):
    """S5.23. Before ATOM has seen it in its queue, and after that, when it waits for the end of a load."""
    write_prompts(path)
    with TieredEngine(config_over(path)) as engine:
        seq = parked(engine, reads, PROMPTS[0])
        engine.abort(seq)
        if is_seen_first:
            engine.scheduler.schedule()
            assert engine.scheduler.deferred_free_blocks
        for _ in range(4):
            engine.step()
        assert engine.manager.kv.num_free == engine.manager.kv.num_blocks
        reads.open()
        engine.rest()
        engine.check_at_rest()
        assert not engine.connector.cache.statistics().pool.pinned
        assert engine.serve(PROMPTS[0]).prefix_cache_hit_tokens == 40
        engine.check_at_rest()


def test_a_request_whose_read_does_not_end_is_computed(path, reads, monkeypatch):
    write_prompts(path)
    monkeypatch.setattr(promotions, "PENDING_GRACE_SECONDS", 0.02)
    with TieredEngine(config_over(path)) as engine:
        seq = parked(engine, reads, PROMPTS[0])
        while seq.id not in engine.outputs:
            engine.step()
        assert (seq.prefix_cache_hit_tokens, engine.below.late) == (0, 1)
        reads.open()
        engine.rest()
        engine.check_at_rest()


def parked_again(engine, reads):
    """A request that was loaded, and preempted in its prefill. Now its prefix has left device and host; it waits."""
    seq = engine.add([*PROMPTS[0], *range(900, 920)])
    while not seq.is_partial_prefill:
        engine.step()
    assert (seq.num_cached_tokens, seq.offload_loaded_tokens) == (44, 40)
    engine.scheduler.running.remove(seq)
    assert engine.scheduler.preempt(seq)
    engine.scheduler.waiting.remove(seq)
    for prompt in PROMPTS[1:] * 2:
        engine.serve(prompt)
    reads.shut()
    engine.scheduler.add(seq)
    while not reads.waiting:
        engine.step()
    assert [id for id, live in engine.connector._live.items() if not live.is_admitted] == [seq.id]
    return seq


def test_a_request_that_was_loaded_before_claims_nothing_when_it_waits_in_vain(path, reads, monkeypatch):
    write_prompts(path)
    with TieredEngine(config_over(path, max_num_batched_tokens=4)) as engine:
        monkeypatch.setattr(promotions, "PENDING_GRACE_SECONDS", 0.5)
        seq = parked_again(engine, reads)
        late = engine.below.late
        while seq.id not in engine.outputs:
            engine.step()
        assert engine.below.late == late + 1
        reads.open()
        engine.rest()
        engine.check_at_rest()


def test_a_request_that_was_loaded_before_is_freed_by_atom_itself_when_it_is_aborted(path, reads):
    """ATOM takes it for one whose load has ended, and does not wait for the connector."""
    write_prompts(path)
    with TieredEngine(config_over(path, max_num_batched_tokens=4)) as engine:
        seq = parked_again(engine, reads)
        engine.abort(seq)
        for _ in range(4):
            engine.step()
        reads.open()
        assert not engine.connector._live
        engine.rest()
        assert engine.connector.cache.statistics().running == 0
        engine.check_at_rest()


def test_a_disk_that_fails_is_a_miss_and_left_alone_for_a_while(path, reads):
    write_prompts(path)
    with TieredEngine(config_over(path)) as engine:
        reads.error = OSError(5, "Input/output error")
        assert loaded(map(engine.serve, PROMPTS)) == [0] * len(PROMPTS)
        assert engine.below.cache.loads_failed > 0 and engine.below.state == "paused"
        assert not engine.connector.cache.is_off
        reads.error = None
        engine.connector._clock = lambda: time.monotonic() + PAUSE_SECONDS
        engine.idle()
        assert engine.below.state == "open"
        assert loaded(map(engine.serve, PROMPTS)) == [40] * len(PROMPTS)
        engine.check_at_rest()


# Resets


def test_after_a_reset_nothing_of_before_is_served(path):
    """Nor by the next process: neither what was before the reset, nor what other weights may have written after it."""
    write_prompts(path)
    with TieredEngine(config_over(path)) as engine:
        engine.manager.clear_cache()
        assert loaded(map(engine.serve, PROMPTS)) == [0] * len(PROMPTS)
        engine.check_at_rest()
        assert list(path.rglob(MARK))
    with TieredEngine(config_over(path)) as engine:
        assert engine.below.found == 0 and engine.serve(PROMPTS[0]).prefix_cache_hit_tokens == 0
        assert not list(path.rglob(MARK))


def test_a_reset_reaches_the_files_without_a_request(path):
    write_prompts(path)
    with TieredEngine(config_over(path)) as engine:
        engine.manager.clear_cache()
        engine.rest()
    with TieredEngine(config_over(path)) as engine:
        assert engine.below.found == 0


def test_a_request_that_waits_at_a_reset_stores_nothing(path, reads):
    """Its first blocks are on the device from before the reset, and it computes on from them (rule 13)."""
    write_prompts(path)
    with TieredEngine(config_over(path)) as engine:
        engine.serve(PROMPTS[0][:21])
        seq = parked(engine, reads, PROMPTS[0])
        engine.manager.clear_cache()
        reads.open()
        engine.rest()
        statistics = engine.connector.cache.statistics()
        assert len(engine.outputs[seq.id]) == 2
        assert (statistics.pool.cached, engine.below.cache.pool.cached) == (0, 0)
        engine.check_at_rest()


# Reports


def test_a_report_of_a_tier_passes_the_aggregator_beside_what_it_joins(path):
    with TieredEngine(config_over(path)):
        pass  # the connector is registered
    aggregator = KVOutputAggregator(world_size=2)

    def said(*operations):
        return KVConnectorOutput(
            connector_completions={ConnectorCompletion(CHANNEL, each, True) for each in operations}
        )

    reports = [TierReport(RankReport(rank)) for rank in range(2)]
    first = aggregator.aggregate([said(reports[0], 5), said(reports[1])])
    assert {each.operation_id for each in first.connector_completions} == set(reports)
    second = aggregator.aggregate([said(reports[0]), said(5)])
    assert {each.operation_id for each in second.connector_completions} == {reports[0], 5}
    assert aggregator.pending_count == (0, 0)


def test_lost_reports_are_repeated(path, monkeypatch):
    """ATOM drops the reports of all ranks when one takes long."""
    monkeypatch.setattr("connector.atom.rank_tier.REPEAT_SECONDS", 0.01)
    write_prompts(path)
    with TieredEngine(config_over(path)) as engine:
        poll, polls = engine._poll, iter(range(10_000))
        lossy = lambda: poll() if next(polls) % 3 == 0 else [rank.connector.get_finished() for rank in engine.ranks]  # noqa: E731
        engine._poll = lossy
        assert loaded(map(engine.serve, PROMPTS)) == [40] * len(PROMPTS)
        engine._poll = poll
        engine.rest()
        engine.check_at_rest()


# Refusals at start


@pytest.mark.parametrize(("more", "sentence"), REFUSED)
def test_invalid_options_of_a_tier_are_refused(path, more, sentence):
    with pytest.raises(ConfigurationError) as refused:
        TieredEngine(config_over(path, tier=more))
    assert str(refused.value) == sentence


def test_a_tier_that_is_small_is_refused(path):
    with pytest.raises(ConfigurationError, match=r"the host has 40 blocks, so give the tier at least .* bytes"):
        TieredEngine(config_over(path, slots=79))


def test_weights_that_nothing_identifies_are_refused(path):
    config = config_over(path)
    del config.kv_transfer_config["kv_connector_extra_config"]["tier"]["revision"]
    with pytest.raises(
        ConfigurationError, match=r"nothing tells which weights 'org/model' has: .* give the tier a rev"
    ):
        TieredEngine(config)
    config.hf_config._commit_hash = "0123456789" * 4
    TieredEngine(config).close()
    config.load_dummy = "random"
    with pytest.raises(ConfigurationError, match=r"with load_dummy .* give the tier a revision, or leave it out"):
        TieredEngine(config)


def test_a_tier_below_a_model_with_states_is_refused(path):
    settings = Settings.of(config_over(path))
    assert settings.planner([128]).host_block_bytes == PAGE_BYTES
    with pytest.raises(ConfigurationError, match=r"this model keeps a state in a slot .*: leave the tier out"):
        settings.planner([128, 512])


# Tiers that cannot be opened


def opens_later(path, mend):
    """It serves without its tier, until somebody has mended it: then it finds what is there."""
    with TieredEngine(config_over(path)) as engine:
        engine.rest()
        assert engine.below.state == "paused"
        assert loaded(map(engine.serve, PROMPTS[:2])) == [0, 0] and engine.below.cache.chunks_stored == 0
        mend()
        for rank in engine.ranks:
            rank.connector._tier._tier._attempts.join(PATIENCE)
        engine.serve(PROMPTS[2])
        assert engine.below.found == len(PROMPTS) * BLOCKS
        assert loaded(map(engine.serve, PROMPTS[3:])) == [40] * len(PROMPTS[3:])
        engine.check_at_rest()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(opening, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(opening, "LONGEST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("connector.atom.rank_tier.REPEAT_SECONDS", 0.01)


def test_a_disk_that_is_not_there_yet(path, impatient):
    write_prompts(path)
    away = path.rename(path.with_name("away"))
    opens_later(path, lambda: away.rename(path))


def test_a_folder_that_another_process_has(path, impatient):
    write_prompts(path)
    other = TieredEngine(config_over(path))
    opens_later(path, other.close)


def test_after_an_upgrade_it_starts_with_all_of_its_bytes(path, monkeypatch):
    write_prompts(path)
    monkeypatch.setattr("connector.atom.tier_settings._release", lambda: "another")
    [old] = path.iterdir()
    with TieredEngine(config_over(path)) as engine:
        engine.rest()
        assert (engine.below.state, engine.below.found) == ("open", 0)
    [new] = path.iterdir()
    assert new != old


def test_engines_under_data_parallelism_have_folders_of_their_own(path):
    configs = [config_over(path, parallel_config=SimpleNamespace(data_parallel_rank=number)) for number in range(2)]
    with TieredEngine(configs[0]), TieredEngine(configs[1]):
        assert [each.name for each in path.glob("engine*")] == ["engine-1"]


@pytest.mark.parametrize(
    "other",
    [
        dict(tier={"revision": "2"}),
        dict(tier={"model": "another"}),
        dict(torch_dtype="torch.float16"),
        dict(kv_cache_dtype="fp8"),
        dict(kv_cache_block_size=8),
        dict(hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 5.0})),
        dict(online_quant_config={"method": "fp8"}),
        dict(dcp_config=SimpleNamespace(interleave_size=4)),
    ],
    ids=["revision", "model", "dtype", "kv dtype", "blocks", "configuration", "quantization", "interleave"],
)
def test_an_engine_that_differs_finds_nothing(path, other):
    written = write_prompts(path)
    tier = dict(keep_others=True) | other.pop("tier", {})
    with TieredEngine(config_over(path, tier=tier, **other)) as engine:
        assert engine.below.found == 0
    with TieredEngine(config_over(path)) as engine:
        assert engine.below.found == written


@pytest.mark.parametrize(
    "switch", ["ATOM_USE_TRITON_MLA", "ATOM_USE_TRITON_MLA_SHUFFLE_KV", "ATOM_MLA_PAGE_SIZE", "ATOM_USE_UNIFIED_ATTN"]
)
def test_an_engine_whose_environment_lays_out_kv_otherwise_finds_nothing(path, monkeypatch, switch):
    """Its tensors have the same shapes."""
    monkeypatch.delenv(switch, raising=False)
    written = write_prompts(path)
    monkeypatch.setenv(switch, "1")
    with TieredEngine(config_over(path, tier=dict(keep_others=True))) as engine:
        assert engine.below.found == 0
    monkeypatch.delenv(switch)
    with TieredEngine(config_over(path)) as engine:
        assert engine.below.found == written


def test_keys_of_an_engine_with_a_tier_are_sha256(path):
    """Rule 14."""
    with TieredEngine(config_over(path)) as engine:
        seq = engine.add(PROMPTS[0])
        assert {len(key) for key in engine.connector._requests.request(seq).keys} == {32}
        engine.rest()


def test_an_engine_without_a_tier_runs_none(path):
    config = config_over(path)
    del config.kv_transfer_config["kv_connector_extra_config"]["tier"]
    engine = Engine(config)
    assert engine.connector.tier is None and not list(path.iterdir())
