"""ATOM's connector tests with a counterpart, and reasons for the others, name by name.

A test has a counterpart if a docstring of a file of `OURS`, or a list of `test_peer_codec.py`, names it.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.engines.atom.test_double import real

HERE = Path(__file__).parent
FILES = {
    "tests/test_dense_offload_connector.py": 17,
    "tests/test_lmcache_offload_connector.py": 138,
    "tests/test_kv_connector_scheduler.py": 20,
}
OURS = ("test_peer_cases.py", "test_peer_codec.py", "test_peer_states.py", "test_states.py", "test_stories.py")
BETWEEN_INSTANCES = (
    "tests/test_kv_connector_scheduler.py"  # all 20: ATOM skips them itself, as what they import has moved
)

# Reason -> how the names of the tests begin, without "test_".
WITHOUT_COUNTERPART = {
    "LMCache: its configuration, engine, lookup server, pins and memory objects": (
        "dense_scheduler_invalid_lmcache",
        "dense_scheduler_rejects_coerced",
        "dense_lookup_unpin",
        "lookup_unpin_ids",
        "lookup_miss_is_forwarded",
        "worker_unpins_only",
        "build_lmcache_config",
        "lmcache_disk",
        "raw_bytes_metadata",
        "lmcache_engine_uses",
        "dsv4_scheduler_invalid_lmcache",
        "dsv4_scheduler_rejects_fractional",
        "lmcache_connector_rejects_oversized",
        "engine_id",
        "replica_world_size",
        "page_lookup_retry",
        "dense_backend_registers",
    ),
    "a prefix that is saved again though it is there, which ours must not do": ("lookup_time_hbm_satisfies",),
    "its staging buffers on the device, and Triton without which it does not start": (
        "staged_pipeline",
        "pipeline_exception",
        "lmcache_connector_fused",
        "lmcache_connector_requires_fused",
        "lmcache_connector_respects_staging",
        "lmcache_connector_default_staging",
        "register_page_regions_fails_before",
    ),
    "chunks of 256 tokens, which are filled, aligned and parked for: ours loads blocks from where the device ends": (
        "unaligned_hbm_handoff",
        "worker_reports_unaligned",
        "lmcache_connector_maps_token_ranges",
        "scheduler_alignment_uses",
        "zero_checkpoint_interval",
    ),
    "the index of sidecars and its generations: ours has states and blocks in one index": (
        "bounded_commit_index",
        "committed_sidecar",
        "sidecar_hashes",
        "earlier_save_completion",
        "collapsed_sidecar",
        "sidecar_only_save_statistics",
        "stateful_load_without_destination",
    ),
    "where states are kept, which ours leaves to ATOM's scheduler": (
        "prefill_chunk",
        "partial_prefill_resumes",
        "sidecar_chunk_cut",
        "scheduler_snaps",
        "zero_sidecar",
    ),
    "a load for a request of which the device has some: refused by theirs, made by ours": (
        "stateful_load_rejects_nonzero",
    ),
    "an older state after a load that failed: ours drops all that the load has read": (
        "stateful_load_failure_falls_back",
    ),
    "roles that only store or only load: a request says so with its kv_transfer_params": (
        "dense_consumer_role",
        "scheduler_producer_role",
    ),
    "pipeline parallelism and connectors of several parts, which ours refuses": (
        "cpu_budget_split",
        "pp_connector_only",
        "multi_metadata",
    ),
    "ids of requests as text, or without a generation, for connectors older than generations": (
        "finished_recv_matches_string",
        "raw_callbacks_remain",
    ),
    "two live requests with one id, which ATOM's scheduler itself confuses": ("late_load_terminal_cannot",),
    "a block that is stored twice at once: reading it twice harms nothing, loading it twice is refused": (
        "codec_chunk_major_rejects_duplicate",
    ),
}


def their_tests(path):
    return {
        node.name
        for node in ast.walk(ast.parse(real(path)))
        if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"
    }


def counterparts():
    """The names of their tests that ours name, by the file that names them."""
    found = set()
    for file in OURS:
        tree = ast.parse((HERE / file).read_text())
        ours = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        found |= {name for text in texts for name in re.findall(r"\btest_\w+\b(?!\.py)", text)} - ours
    return found


@pytest.mark.parametrize(("path", "count"), FILES.items())
def test_each_of_atoms_tests_has_a_counterpart_or_one_reason(path, count):
    names = their_tests(path)
    assert len(names) == count
    if path == BETWEEN_INSTANCES:
        return
    for name in names:
        reasons = [why for why, starts in WITHOUT_COUNTERPART.items() if name.removeprefix("test_").startswith(starts)]
        assert len(reasons) + (name in counterparts()) == 1, name


def test_every_test_of_atoms_that_ours_name_exists():
    theirs = set().union(*(their_tests(path) for path in FILES))
    assert counterparts() <= theirs
    for starts in WITHOUT_COUNTERPART.values():
        for start in starts:
            assert any(name.removeprefix("test_").startswith(start) for name in theirs), start


def test_the_page_has_the_numbers():
    page = " ".join((HERE.parents[2] / "docs" / "atom.md").read_text().split())
    assert f"own {sum(FILES.values())} tests of its connectors {len(counterparts())} have a counterpart" in page
    assert f"{FILES[BETWEEN_INSTANCES]} are of transfers between instances" in page


def test_a_test_without_a_reason_is_seen(monkeypatch):
    monkeypatch.delitem(WITHOUT_COUNTERPART, next(iter(WITHOUT_COUNTERPART)))
    with pytest.raises(AssertionError):
        test_each_of_atoms_tests_has_a_counterpart_or_one_reason("tests/test_lmcache_offload_connector.py", 138)
