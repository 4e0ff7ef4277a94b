"""Which engines are not here, and how many tests a run leaves out because of that.

A module whose engine is not here is skipped as a whole, without being imported. So its tests are counted by their
`def`s: one with parameters counts as one.
"""

import ast
from collections import Counter
from pathlib import Path

NEEDS_ATOM = "pytest.skip(WHY_NOT_REAL, allow_module_level=True)"


def number_of_tests(file: Path) -> int:
    """How many test functions this file has."""
    defined = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))
    return sum(node.name.startswith("test_") for node in defined)


def left_out(files: set[Path], why_not_atom: str | None, why_not_nano: str | None) -> Counter[str]:
    """By the reason, how many tests of these files are left out."""
    counts: Counter[str] = Counter()
    for file in files:
        if why_not_atom and NEEDS_ATOM in file.read_text():
            counts[why_not_atom] += number_of_tests(file)
        if why_not_nano and file.name == "test_nano_vllm.py":
            counts[why_not_nano] += number_of_tests(file)
    return counts


def last_line(counts: Counter[str]) -> str:
    """Last line of a run."""
    if not counts:
        return ""
    reasons = "; ".join(f"{number} tests ({why})" for why, number in counts.items())
    return f"NOT A FULL RUN, left out: {reasons}"
