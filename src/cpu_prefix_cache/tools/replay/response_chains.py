"""Joins requests of the Responses API to what the server knows of them: `previous_response_id` names the history.

A log has that history if its lines have responses too: `"response": {"id": ..., "output": [...]}`. Instructions are of
one request, and are not carried on.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from cpu_prefix_cache.tools.replay.answer_texts import Object, answers_in
from cpu_prefix_cache.tools.replay.lines import BadLine

PREVIOUS = "previous_response_id"
RESPONSES = ("response", "response_body")
Item = dict[str, Any]


class ResponseChains:
    """The items of each response's conversation, with its output, by the id of the response."""

    def __init__(self) -> None:
        self._items: dict[str, list[Item]] = {}

    def history(self, body: dict[str, Any]) -> list[Item]:
        """The items before those of this request. Raises BadLine if only the server has them."""
        if not body.get(PREVIOUS):
            return []
        previous = str(body[PREVIOUS])
        if previous not in self._items:
            raise BadLine(
                f"its history is on the server: no line before it has the response {previous[:40]!r} with its output, "
                'as "response": {"id": ..., "output": [...]}'
            )
        return self._items[previous]

    def add(self, line: dict[str, Any], items: list[Item]) -> None:
        """`items` are of the request and its history; `line` has the response, if it was logged."""
        for response in _responses(line):
            output = response.get("output")
            if isinstance(output, list) and all(isinstance(item, dict) for item in output):
                self._items[str(response.get("id"))] = [*items, *output]


def _responses(line: Object) -> Iterator[Object]:
    """Objects, also in a text, also as the body of a response."""
    for name in RESPONSES:
        value = line.get(name)
        for response in answers_in(value, is_body=True) if isinstance(value, str) else [value]:
            if isinstance(response, Mapping):
                body = response.get("body")
                yield body if isinstance(body, Mapping) else response
