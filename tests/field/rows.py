"""The field as data: what people run that our own tests do not set up, a row each. `rows.toml` has them.

    environment    which Python it runs in (environments.py)
    bytes          tests whose failure means wrong bytes, or an engine that stops
    hits           tests whose failure means that what is stored is not found
    refusals       tests that show a sentence instead
    needs          variables of the environment that must name a folder or an archive

A selection is what pytest is given: files, and options behind them. One that selects nothing is a row that is not run.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("rows.toml")
KINDS = ("bytes", "hits", "refusals")


@dataclass(frozen=True)
class Row:
    """`seconds` is how long each of its selections may take."""

    name: str
    environment: str
    bytes: str = ""
    hits: str = ""
    refusals: str = ""
    needs: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    seconds: int = 1800

    @property
    def selections(self) -> dict[str, str]:
        """By their kind, those that are not empty."""
        return {kind: said for kind in KINDS if (said := getattr(self, kind))}


def rows_of(file: Path = FILE) -> list[Row]:
    """Raises ValueError for a row without tests, or one whose name stands twice."""
    rows = [_row(each) for each in tomllib.loads(file.read_text())["row"]]
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{file.name} has two rows {twice[0]!r}")
    return rows


def _row(said: dict[str, Any]) -> Row:
    row = Row(**said | {"needs": tuple(said.get("needs", ()))})
    if not row.selections:
        raise ValueError(f"the row {row.name!r} has no tests: give it one of {', '.join(KINDS)}")
    return row
