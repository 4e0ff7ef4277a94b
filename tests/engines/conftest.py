"""Foreign engines. A run prints which ATOM it has, and in its last line how many tests it leaves out without one."""

from pathlib import Path

import pytest

from tests.engines.atom import source
from tests.engines.left_out import last_line, left_out
from tests.engines.sources import NANO_VLLM, found, why_not

WHY_NOT_NANO = None if found(NANO_VLLM) else why_not(NANO_VLLM)
_collected: set[Path] = set()
collect_ignore = ["nano_on_cpu.py"]  # doctests would import it, which replaces parts of nano-vllm


def pytest_report_header():
    return source.WHY_NOT_REAL or source.description()


def pytest_collect_file(file_path):
    if file_path.name.startswith("test_"):
        _collected.add(file_path)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    writer = config.get_terminal_writer()
    if not source.WHY_NOT_REAL:
        writer.line(source.description())
    if line := last_line(left_out(_collected, source.WHY_NOT_REAL, WHY_NOT_NANO)):
        writer.line(line, red=True, bold=True)
