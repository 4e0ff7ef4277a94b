"""README's table of kinds of KV state: a row for each kind, a column for each way in. Its cells are words:

kept              found again by later prompts
computed again    left out: after each hit the engine computes it anew
refused           a ConfigurationError at start
nothing           there is no such kind there
"""

from collections.abc import Callable
from itertools import dropwhile, takewhile
from pathlib import Path

from cpu_prefix_cache import ConfigurationError

KEPT, ANEW, REFUSED = "kept", "computed again", "refused"
README = Path(__file__).parents[2] / "README.md"
HEAD = "| kind of KV state |"


def column(name: str) -> dict[str, str]:
    """The cells of one column that are not empty, by their row."""
    lines = dropwhile(lambda line: not line.startswith(HEAD), README.read_text().splitlines())
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in takewhile(bool, lines))
    at = head.index(name)
    return {row[0]: row[at] for row in rows if row[at]}


def outcome(build: Callable[[], bool]) -> str:
    """The word for a kind, by what comes of a cache with it; `build` answers whether it keeps all of it."""
    try:
        return KEPT if build() else ANEW
    except ConfigurationError:
        return REFUSED
