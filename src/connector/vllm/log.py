"""Where the log of connector and library goes in a process of vLLM: through vLLM's own.

vLLM gives handlers, a format and a level to its own loggers only. Without this, lines of ours below a warning would be
lost, and others would come without time and process. A line goes on as if vLLM's logger had been called, so it follows
whatever configuration that has.
"""

import logging

from vllm.logger import init_logger

OURS = ("connector", "cpu_prefix_cache", "cpu_prefix_cache_vllm")


class _Forwarding(logging.Handler):
    """Hands records to vLLM's logger."""

    def __init__(self) -> None:
        super().__init__()
        self._to = init_logger("vllm")

    def emit(self, record: logging.LogRecord) -> None:
        if self._to.isEnabledFor(record.levelno):
            self._to.handle(record)


def log_through_vllm() -> None:
    """From now on, in this process. Loggers to which somebody has given handlers are left alone."""
    for name in OURS:
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(_Forwarding())
            logger.setLevel(logging.DEBUG)  # vLLM's level counts
            logger.propagate = False
