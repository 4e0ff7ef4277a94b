"""Whether a logged request failed, so that its prompt was not computed as far as its line shows.

It failed if

    it was refused           a status from 400 on; in the line or the request, an error, no success, a word for failure
    it ended without output  an error in the answer, or a word for failure or for an end ahead of time

With output, the prompt was computed, however the answer ended. An error may stand in an answer whose status is 200.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from cpu_prefix_cache.tools.replay.answer_texts import WRITTEN, answers_in
from cpu_prefix_cache.tools.replay.request_bodies import BODIES
from cpu_prefix_cache.tools.replay.request_fields import ERRORS, REASONS, STATUSES, SUCCESS

Place = Mapping[str, Any]

ANSWER = "response"  # of a server, or of the model
IN_TEXTS = (*BODIES, ANSWER, "response_body")
ANSWERS = (ANSWER, "response_body", "out", "choices", "usage", "meta_info", "details", "finish_reason")
IN_ANSWERS = (*ANSWERS, "body", "delta", "message", "incomplete_details")
OUTPUT_TOKENS = ("completion_tokens", "output_tokens", "generated_tokens")
OUTPUTS = ("output", "completion", "output_text", "generated_text")
TEXTS = (
    *OUTPUTS,
    WRITTEN,
    "content",
    "reasoning_content",
    "reasoning",
    "thinking",
    "refusal",
    "tool_calls",
    "partial_json",
    "delta",
)
OBJECTS = ("function_call", "audio")

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
    if any(map(_has_failed_status, places)) or any(map(_has_error, requests)):
        return True
    words = {word for place in places for word in _words(place, (*STATUSES, *REASONS))}
    if words.isdisjoint(FAILED_WORDS | EARLY_WORDS) and not any(map(_has_error, answers)):
        return False
    return words.isdisjoint(CUT_WORDS) and not _has_output(requests, answers)


def _requests(place: Place) -> Iterator[Place]:
    """The line, and the levels in it down to the body of the request."""
    yield place
    for inner in _inner(place, BODIES):
        yield from _requests(inner)


def _answers(place: Place, names: Iterable[str] = ANSWERS) -> Iterator[Place]:
    """The answer, and the parts of it with its end and its kind."""
    for part in _inner(place, names):
        yield part
        yield from _answers(part, IN_ANSWERS)


def _inner(place: Place, names: Iterable[str]) -> Iterator[Place]:
    for name in names:
        value = place.get(name)
        if isinstance(value, str) and name in IN_TEXTS:
            value = answers_in(value, is_body=name != ANSWER)
        yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, Mapping))


def _words(place: Place, names: Iterable[str]) -> Iterator[str]:
    """Words for how it ended: "abort", {"type": "abort"}."""
    for value in map(place.get, names):
        yield str(value.get("type") if isinstance(value, Mapping) else value).lower()


def _has_error(place: Place) -> bool:
    return (
        place.get(SUCCESS) is False
        or "error" in (place.get("object"), place.get("type"))
        or not FAILED_WORDS.isdisjoint(_words(place, STATUSES))
        or any(_is_error(place.get(name)) for name in ERRORS)
    )


def _is_error(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(value.values())
    return bool(value) and str(value).lower() not in NO_ERROR


def _has_failed_status(place: Place) -> bool:
    """Whether a status begins with a number from 400 on: 500, 500.0, 500 Internal Server Error."""
    numbers = (re.match(r"[0-9]{1,9}\b", str(place.get(name, ""))) for name in STATUSES)
    return any(number is not None and int(number[0]) >= FAILED for number in numbers)


def _has_output(requests: Iterable[Place], answers: Iterable[Place]) -> bool:
    """Whether the answer has a text or a call, or a number of tokens. A request has texts of its own."""
    numbers = (place.get(name) for place in (*requests, *answers) for name in OUTPUT_TOKENS)
    texts = chain(
        (request.get(name) for request in requests for name in OUTPUTS),
        (answer.get(name) for answer in answers for name in TEXTS),
    )
    return (
        any(isinstance(number, int | float) and number > 0 for number in numbers)
        or any(isinstance(text, str | list) and text for text in texts)
        or any(answer.get(name) for answer in answers for name in OBJECTS)
    )
