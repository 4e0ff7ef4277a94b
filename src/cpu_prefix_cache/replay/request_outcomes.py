"""Says whether a logged request failed, so that its prompt was not computed as far as its line shows.

It failed if the line, a level of the request or the answer in it has

    an error, no success, a status from 400 on or a word for failure
    a word for an end ahead of time, and no output: an answer that was cut short was computed all the same

The answer is an object, its JSON, or a stream of events; an error may stand in it though its status is 200.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from cpu_prefix_cache.replay.lines import BadLine, parsed
from cpu_prefix_cache.replay.request_bodies import BODIES
from cpu_prefix_cache.replay.request_fields import ERRORS, REASONS, STATUSES, SUCCESS

Place = Mapping[str, Any]

ANSWERS = ("response", "response_body", "out", "choices", "usage", "meta_info", "details", "finish_reason")
IN_ANSWERS = (*ANSWERS, "body", "delta", "message", "incomplete_details")
OUTPUT_TOKENS = ("completion_tokens", "output_tokens", "generated_tokens")
OUTPUTS = ("output", "completion")
TEXTS = (*OUTPUTS, "text", "content", "output_text", "generated_text", "reasoning_content", "tool_calls", "delta")

FAILED = 400
FAILED_WORDS = frozenset(("failure", "failed", "error", "timeout"))
EARLY_WORDS = frozenset(("abort", "aborted", "cancelled", "canceled", "incomplete", "content_filter", "refusal"))
CUT_WORDS = frozenset(("max_output_tokens", "max_tokens", "length"))  # which only an answer can be too long for
NO_ERROR = ("-", "none", "null")


def is_failed(line: Place) -> bool:
    """Whether nothing of this request was computed, as its line has it."""
    requests = list(_requests(line))
    answers = [answer for request in requests for answer in _answers(request)]
    places = [*requests, *answers]
    words = {word for place in places for word in _words(place)}
    if not FAILED_WORDS.isdisjoint(words) or any(map(_has_error, places)):
        return True
    return not EARLY_WORDS.isdisjoint(words) and CUT_WORDS.isdisjoint(words) and not _has_output(requests, answers)


def _requests(place: Place) -> Iterator[Place]:
    """The line, and the levels in it down to the body of the request."""
    yield place
    for inner in _inner(place, BODIES):
        yield from _requests(inner)


def _answers(place: Place, names: Iterable[str] = ANSWERS) -> Iterator[Place]:
    """The answer, and the parts of it that say how it ended and what it is."""
    for part in _inner(place, names):
        yield part
        yield from _answers(part, IN_ANSWERS)


def _inner(place: Place, names: Iterable[str]) -> Iterator[Place]:
    for name in names:
        value = place.get(name)
        values = value if isinstance(value, list) else _events(value) if isinstance(value, str) else [value]
        yield from (each for each in values if isinstance(each, Mapping))


def _events(text: str) -> Iterator[Any]:
    """The JSON of a text, or of the events of a stream. What is none is reported where it is needed."""
    whole = text.lstrip()
    for each in [whole] if whole.startswith("{") else re.findall(r"^data:(.*\{.*)", text, re.MULTILINE):
        try:
            yield parsed(each.encode(errors="replace"))
        except BadLine:
            continue


def _words(place: Place) -> Iterator[str]:
    """Words for how it ended: "abort", {"type": "abort"}."""
    for value in (place.get(name) for name in (*STATUSES, *REASONS)):
        yield str(value.get("type") if isinstance(value, Mapping) else value).lower()


def _has_error(place: Place) -> bool:
    statuses = (str(place.get(name, "")) for name in STATUSES)
    errors = (place.get(name) for name in ERRORS)
    return (
        place.get(SUCCESS) is False
        or "error" in (place.get("object"), place.get("type"))
        or any(map(_is_failure, statuses))
        or any(error and str(error).lower() not in NO_ERROR for error in errors)
    )


def _is_failure(status: str) -> bool:
    """Whether it begins with a number from 400 on: 500, 500.0, 500 Internal Server Error."""
    number = re.match(r"[0-9]{1,9}\b", status)
    return number is not None and int(number[0]) >= FAILED


def _has_output(requests: Iterable[Place], answers: Iterable[Place]) -> bool:
    """Whether the answer has a text or a call, or a number of tokens. A request has texts of its own."""
    numbers = (place.get(name) for place in (*requests, *answers) for name in OUTPUT_TOKENS)
    texts = chain(
        (request.get(name) for request in requests for name in OUTPUTS),
        (answer.get(name) for answer in answers for name in TEXTS),
    )
    return any(isinstance(number, int | float) and number > 0 for number in numbers) or any(
        isinstance(text, str | list) and text for text in texts
    )
