"""State of a row, by the outcomes of its tests.

right        all pass
refused      it has nothing but refusals, and all of them pass
lost hits    a test of hits fails, and none of bytes
wrong        a test of bytes or of a refusal fails, or a test ends with an error, or does not end
not run      no test has run: with the reason
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from xml.etree import ElementTree


class State(Enum):
    RIGHT = "right"
    REFUSED = "refused"
    LOST_HITS = "lost hits"
    WRONG = "wrong"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Outcome:
    state: State
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """Result of pytest for one selection."""

    passed: int = 0
    failed: tuple[str, ...] = ()  # tests
    skipped: tuple[str, ...] = ()  # reasons
    error: str = ""  # what ended it, or kept it from beginning

    @classmethod
    def read(cls, file: Path) -> "Report":
        """Read from a file that pytest has written with --junitxml."""
        cases = list(ElementTree.parse(file).iter("testcase"))
        failed = tuple(case.get("name", "?") for case in cases if case.find("failure") is not None)
        skips = (case.find("skipped") for case in cases)
        skipped = tuple(dict.fromkeys(_reason(each) for each in skips if each is not None))
        errors = [case.get("name", "?") for case in cases if case.find("error") is not None]
        passed = sum(not any(case.find(tag) is not None for tag in ("failure", "skipped", "error")) for case in cases)
        return cls(passed, failed, skipped, f"{errors[0]} does not run" if errors else "")


def _reason(skipped: ElementTree.Element) -> str:
    """Reason of a skip: of a file that skips itself pytest gives it in a tuple behind the file and the line."""
    message = skipped.get("message", "")
    if message != "collection skipped":
        return message
    _, _, said = ast.literal_eval(skipped.text or "")
    return said.removeprefix("Skipped: ")


def outcome(reports: Mapping[str, Report]) -> Outcome:
    """Outcome of a row, by the kinds of its selections."""
    for kind, report in reports.items():
        if report.error:
            return Outcome(State.WRONG, f"{kind}: {report.error}")
    for kind, state in (("bytes", State.WRONG), ("refusals", State.WRONG), ("hits", State.LOST_HITS)):
        failed = reports[kind].failed if kind in reports else ()
        if failed:
            more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            return Outcome(state, f"{failed[0]}{more}")
    passed = sum(report.passed for report in reports.values())
    skipped = [reason for report in reports.values() for reason in report.skipped]
    if not passed:
        return Outcome(State.NOT_RUN, skipped[0] if skipped else "its tests select nothing")
    state = State.REFUSED if set(reports) == {"refusals"} else State.RIGHT
    return Outcome(state, f"{passed} tests" + (f", and some are left out: {skipped[0]}" if skipped else ""))
