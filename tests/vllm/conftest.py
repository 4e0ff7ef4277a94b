import logging
import os

import pytest

# Nothing here needs a network, a second thread, or the engine's chatter.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

logging.getLogger("vllm").setLevel(logging.ERROR)


@pytest.fixture
def log(caplog, monkeypatch):
    """The log of connector and library, in place of vLLM's."""
    from connector.vllm.log import OURS, log_through_vllm

    log_through_vllm()
    for name in OURS:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [caplog.handler])
    return caplog
