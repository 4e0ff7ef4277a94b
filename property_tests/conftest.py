"""One Hypothesis profile for all machines: small pools, many short stories, no clock.

`EXAMPLES=8 python -m pytest property_tests` searches eight times as far, and prints how many steps the machines ran.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine

from property_tests.search import search

os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported: Triton reads it as it decorates

collect_ignore = ["mutants", "planted"]  # tools without tests, which import all of pytest

STEPS = pytest.StashKey[int]()

settings.register_profile(
    "core",
    derandomize="CI" in os.environ,  # a change is judged by what it does, and searched further on its author's machine
    deadline=None,
    report_multiple_bugs=False,
    print_blob=False,
    max_examples=80,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.load_profile("core")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "EXAMPLES" in os.environ:
        search(items, float(os.environ["EXAMPLES"]))


@pytest.fixture(autouse=True, scope="session")
def _counted_steps(pytestconfig: pytest.Config) -> Iterator[None]:
    """Counts the rules that state machines run in this process."""
    check = RuleBasedStateMachine.check_invariants
    pytestconfig.stash[STEPS] = 0

    def count(machine: RuleBasedStateMachine, *arguments: Any) -> None:
        pytestconfig.stash[STEPS] += 1
        check(machine, *arguments)

    RuleBasedStateMachine.check_invariants = count
    yield
    RuleBasedStateMachine.check_invariants = check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if "EXAMPLES" in os.environ and STEPS in config.stash:  # each worker of xdist counts its own
        terminalreporter.write_line(f"{config.stash[STEPS]:,} steps of state machines")
