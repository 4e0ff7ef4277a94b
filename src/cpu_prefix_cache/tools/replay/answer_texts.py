"""Reads what a server answered from a text: JSON, lines of JSON, or a stream of events.

A text of another kind is what the model wrote. So is JSON under a name that may hold either, unless it has the mark of
an answer of a server: models write JSON too, and errors in it are about something else.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cpu_prefix_cache.tools.replay.lines import BadLine, parsed

Object = Mapping[str, Any]

WRITTEN = "text"  # the field of what the model wrote
CODED = re.compile(r"\s*(?:\{|(?:data|event|id|retry)?:)")
OBJECT_LINES = re.compile(r"^(?:data:[ ]?)?(\{.*)", re.MULTILINE)
MARKS = frozenset(("choices", "object", "usage", "meta_info"))
MARKED_TYPES = ("response.", "message")


def answers_in(text: str, *, is_body: bool) -> list[Object]:
    """The objects of the answer, or one that has the text. `is_body` marks a text that is not the model's alone."""
    if CODED.match(text):
        objects = list(_objects(text))
        if is_body or any(map(_is_marked, objects)):
            return objects
    return [{WRITTEN: text}]


def _is_marked(answer: Object) -> bool:
    return not MARKS.isdisjoint(answer) or str(answer.get("type")).startswith(MARKED_TYPES)


def _objects(text: str) -> Iterator[Object]:
    """The whole, or else each line. What is no JSON is reported where it is needed."""
    whole = _parsed(text)
    for value in [whole] if whole is not None else map(_parsed, OBJECT_LINES.findall(text)):
        if isinstance(value, Mapping):
            yield value


def _parsed(text: str) -> Any:
    try:
        return parsed(text.encode(errors="replace"))
    except BadLine:
        return None
