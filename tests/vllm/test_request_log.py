"""The log of vLLM's own request logger, as `convert` reads it: token ids, and the adapter in the line below."""

import json
import logging

from vllm import SamplingParams
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.logger import _DATE_FORMAT
from vllm.lora.request import LoRARequest

from cpu_prefix_cache.tools.cli import main


def test_convert_reads_what_vllm_logs_of_requests(tmp_path):
    handler = logging.FileHandler(tmp_path / "log")
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [logger.py:1] %(message)s", _DATE_FORMAT))
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        theirs = RequestLogger(max_log_len=None)
        for number, adapter in enumerate([LoRARequest("x", 1, "/x"), None, LoRARequest("x", 1, "/x")]):
            theirs.log_inputs(f"cmpl-{number}", "prompt_token_ids: [9]", [1, 2, 3], None, SamplingParams(), adapter)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert main(["convert", str(tmp_path / "log"), "--out", str(tmp_path / "trace"), "--block-tokens", "1"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert [row["hash_ids"] for row in rows] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
