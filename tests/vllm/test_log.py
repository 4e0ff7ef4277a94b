"""Messages of connector and library are in vLLM's log, in its format, and one line sums up the start of an engine."""

import logging
import re

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.vllm import CPUPrefixCacheConnector
from connector.vllm.log import log_through_vllm
from tests.vllm.engine import BLOCK, full, one_group, state, vllm_config
from tests.vllm.real_cache import PROMPTS, CachedEngine, folder_of

BLOCKS = 48


def lines_of_start(folder, log, caches, ranks=1, **said):
    """Lines that the worker halves of an engine with so many ranks log."""
    config = vllm_config(folder, **said)
    config.cache_config.num_gpu_blocks = BLOCKS
    config.parallel_config.world_size = config.parallel_config.pipeline_parallel_size = ranks
    if caches.has_mamba_layers:
        config.cache_config.mamba_cache_mode = "align"
    for config.parallel_config.rank in range(ranks):
        worker = CPUPrefixCacheConnector(config, KVConnectorRole.WORKER, caches)
        worker.register_kv_caches(tensors_of(caches))
        worker.shutdown()
    return [record.getMessage() for record in log.records if record.levelname == "INFO"]


def tensors_of(caches):
    made = {}
    for group in caches.kv_cache_groups:
        states = vars(group.kv_cache_spec).get("shapes")
        for name in group.layer_names:
            made[name] = torch.zeros(BLOCKS, 2, BLOCK, 2, 16)
            if states:
                made[name] = [torch.zeros(BLOCKS, *shape) for shape in states]
    return made


def test_one_line_gives_the_size_and_the_options(tmp_path, log):
    lines = lines_of_start(tmp_path, log, one_group(BLOCKS), cpu_bytes_to_use=2**30)
    chunk = 2 * 2 * BLOCK * 2 * 16 * 4
    assert lines == [
        f"the host cache has 1.0 GiB, {2**30 // chunk:,} blocks: {2**30 // chunk * BLOCK:,} tokens in prompts of 256; "
        "lazy, adaptive, no tier; emptied with the device; reference copies (the device tensors are in host memory, "
        "where there is no link to keep busy)"
    ]


def test_the_line_has_the_options_of_the_operator(tmp_path, log):
    tier = {"kind": "file", "path": str(tmp_path), "bytes": 3 * 2**20, "revision": "random"}
    chosen = dict(cpu_bytes_to_use=2**20, offload="eager", policy="arc", tier=tier, reset="never")
    (line,) = lines_of_start(tmp_path, log, one_group(BLOCKS), **chosen)
    assert f"; eager, arc, a tier of 0.0 GiB in {tmp_path}; never emptied, also by new weights; reference" in line


def test_tokens_are_those_that_fit_with_their_checkpoints(tmp_path, log):
    caches = KVCacheConfig(BLOCKS, [], [full(), state()], 0)
    (line,) = lines_of_start(tmp_path, log, caches, cpu_bytes_to_use=2**30)
    blocks, tokens = (
        int(each.replace(",", "")) for each in re.search(r"([\d,]+) blocks: ([\d,]+) tokens", line).groups()
    )
    prompt = 256 // BLOCK + 5  # a state takes five blocks of attention
    assert tokens == pytest.approx(blocks / prompt * 256, rel=0.01)


# In vLLM's log


@pytest.fixture
def shown():
    """Lines that vLLM shows."""
    lines, logger = [], logging.getLogger("vllm")

    class Shown(logging.Handler):
        def emit(self, record):
            lines.append((record.levelname, record.getMessage()))

    handler, level = Shown(), logger.level
    logger.addHandler(handler)
    yield lines, logger
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("name", ["connector.vllm.worker", "cpu_prefix_cache.copier.worker"])
def test_lines_are_shown_from_the_level_on_that_vllm_has(shown, name):
    lines, vllm = shown
    log_through_vllm()
    log_through_vllm()
    ours = logging.getLogger(name)
    for vllm_level in (logging.INFO, logging.ERROR):
        vllm.setLevel(vllm_level)
        ours.debug("of no interest")
        ours.info("begun with %d", vllm_level)
        ours.error("ended with %d", vllm_level)
    assert lines == [("INFO", "begun with 20"), ("ERROR", "ended with 20"), ("ERROR", "ended with 40")]


def test_handlers_given_to_our_loggers_are_kept(shown, monkeypatch):
    lines, _ = shown
    own = logging.NullHandler()
    ours = logging.getLogger("cpu_prefix_cache")
    monkeypatch.setattr(ours, "handlers", [own])
    log_through_vllm()
    ours.error("not for vLLM")
    assert ours.handlers == [own] and lines == []


def test_a_real_engine_shows_the_line_in_its_format(capfd, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    with CachedEngine(folder_of("llama")) as engine:
        engine.answer(PROMPTS[:1])
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "the host cache has" in line]
    assert re.search(r"pid=\d+\) INFO \d\d-\d\d [\d:]+ \[.*worker\.py:\d+\] the host cache has 0\.0 GiB, ", line), line
