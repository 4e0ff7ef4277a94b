"""Reads what people have of a server's requests: logs of texts, messages or token ids, in many shapes.

    {"timestamp": 1.5, "messages": [...]}     or "prompt", "input"; also under "body" or "request", as an object or as
                                              JSON in a text
    {"event": "request.received", "obj": ...} SGLang's log in JSON
    {"conversations": [{"from": "human", ...  ShareGPT, also as one list for the whole file: a request for each question
    ... Request ID details: ...               vLLM's debug log
    ... Receive: obj=GenerateReqInput(...     SGLang's log in text

Times are numbers or ISO 8601. Lines of other kinds are counted, because engines log other things to the same file.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import Any, NamedTuple

from cpu_prefix_cache.replay.lines import (
    BadLine,
    LineReader,
    TraceError,
    is_time,
    list_of,
    parsed,
    parsed_object,
    shown,
)

BODIES = ("body", "request", "request_body", "obj")
TIMES = ("timestamp", "time", "created", "created_at", "start_time")
IDS = ("prompt_token_ids", "token_ids", "input_ids")
TEXTS = ("prompt", "input", "text")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
RECEIVED = "request.received"

# Texts come before the ids in these lines, so the last match is the right one.
LOGGED_IDS = (
    re.compile(rb"(?:Request|Received request) \S+.*prompt_token_ids: (\[[\d, ]*\]|None)"),
    re.compile(rb"Receive: obj=GenerateReqInput\(.*input_ids=(\[[\d, ]*\](?: \.\.\. \[)?|None)"),
)
LOGGED_TIMES = (
    (re.compile(rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)"), "%Y-%m-%d %H:%M:%S", ""),
    (re.compile(rb"(\d\d-\d\d \d\d:\d\d:\d\d)"), "%Y-%m-%d %H:%M:%S", "2000-"),  # vLLM leaves out the year
)


class Time(NamedTuple):
    """In seconds, if it was a time of the day; a number may be in milliseconds."""

    value: float
    is_of_day: bool


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, as chat templates take them, with what else the request gives the template."""

    messages: list[dict[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt. `line` and `turn` number it in its file."""

    line: int
    time: Time | None
    content: str | list[int] | Chat
    turn: int = 0


class RequestLog:
    """One file. `other_lines` counts what is no request."""

    def __init__(self, path: str, skip_bad_lines: bool) -> None:
        self.lines = LineReader(path, skip_bad_lines)
        self.other_lines = 0

    def read(self) -> Iterator[Recorded]:
        """Raises TraceError for a file that cannot be read or holds no requests, and for bad lines."""
        found = 0
        for number, line in enumerate(self._parts(), 1):
            try:
                requests = list(_recorded(number, line))
            except BadLine as error:
                self.lines.refuse(number, error)
                continue
            self.other_lines += not requests
            found += len(requests)
            yield from requests
        if not found:
            raise self.lines.nothing_found()

    def _parts(self) -> Iterator[bytes | dict[str, Any]]:
        """Lines, or the members of the list that the file is."""
        lines = self.lines.lines()
        first = next(lines, b"")
        if not re.fullmatch(rb"\s*\[\s*(\{.*)?", first, re.DOTALL):
            yield from chain([first] if first else [], lines)
            return
        try:
            members = parsed(b"".join([first, *lines]))
        except BadLine as error:
            raise TraceError(f"{self.lines.path} begins like a list, and {error}") from error
        if not all(isinstance(member, dict) for member in members):
            raise TraceError(f"{self.lines.path} is a list of something else than JSON objects")
        yield from members


def _recorded(number: int, line: bytes | dict[str, Any]) -> Iterator[Recorded]:
    if isinstance(line, dict):
        yield from _of_object(number, line)
    elif line.lstrip(b"\xef\xbb\xbf \t").startswith(b"{"):
        yield from _of_object(number, parsed_object(line))
    else:
        for pattern in LOGGED_IDS:
            if match := pattern.search(line):
                yield Recorded(number, _logged_time(line), _logged_ids(match[1]))
                return


def _logged_ids(text: bytes) -> list[int]:
    if text == b"None":
        raise BadLine("it was logged without token ids")
    if b"..." in text:
        raise BadLine("its token ids were cut when they were logged")
    ids: list[int] = json.loads(text)
    return _not_empty(ids)


def _logged_time(line: bytes) -> Time:
    for pattern, style, year in LOGGED_TIMES:
        if match := pattern.search(line):
            try:
                return _of_day(datetime.strptime(year + match[1].decode(), style))
            except ValueError as error:
                raise BadLine(f"its time is none: {error}") from error
    raise BadLine("it has no time")


def _of_object(number: int, values: dict[str, Any]) -> Iterator[Recorded]:
    if values.get("event", RECEIVED) != RECEIVED:
        return
    time = _time(values)
    if "conversations" in values:
        for turn, messages in enumerate(_questions(values)):
            yield Recorded(number, time, Chat(messages), turn)
        return
    for content in _contents(_body(values)):
        yield Recorded(number, time, content)


def _body(values: dict[str, Any]) -> dict[str, Any]:
    """The request itself, which may be a part of the line, or JSON in a text of it."""
    for name in BODIES:
        body = values.get(name)
        if isinstance(body, str) and body.lstrip().startswith("{"):
            body = parsed(body.encode())
        if isinstance(body, dict):
            return body
    return values


def _contents(body: dict[str, Any]) -> Iterator[str | list[int] | Chat]:
    for name in IDS:
        if body.get(name) is not None:
            yield _not_empty(list_of(body, name, [int], "integers"))
            return
    if "messages" in body:
        yield _chat(body, "messages")
        return
    for name in TEXTS:
        value = body.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, list) and value:
            yield from _of_list(body, name)
        else:
            continue
        return
    raise BadLine(f"it has none of {', '.join((*IDS, 'messages', *TEXTS))}")


def _of_list(body: dict[str, Any], name: str) -> Iterator[str | list[int] | Chat]:
    """Token ids, several prompts of them or of text, or messages."""
    value = body[name]
    if isinstance(value[0], dict):
        yield _chat(body, name)
    elif isinstance(value[0], int):
        yield list_of(body, name, [int], "integers")
    elif isinstance(value[0], list):
        yield from (list_of({name: ids}, name, [int], "lists of integers") for ids in value)
    else:
        yield from list_of(body, name, [str], "texts, of integers or of messages")


def _chat(body: dict[str, Any], name: str) -> Chat:
    messages = list_of(body, name, [dict], "messages")
    if not messages:
        raise BadLine(f"{name} is empty")
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise BadLine(f"chat_template_kwargs must be an object, got {shown(body, 'chat_template_kwargs')}")
    return Chat([_message(message) for message in messages], {"tools": body.get("tools"), **options})


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """With its parts of text joined."""
    if not isinstance(message.get("role"), str):
        raise BadLine("a message has no role")
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadLine(f"a part of a message is no text, but {json.dumps(kind)[:40]}")
    return {**message, "content": "".join(part["text"] for part in content)}


def _questions(values: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The messages up to each question of a conversation."""
    turns = list_of(values, "conversations", [dict], "turns")
    messages: list[dict[str, Any]] = []
    for turn in turns:
        role, text = ROLES.get(str(turn.get("from", turn.get("role")))), turn.get("value", turn.get("content"))
        if role is None or not isinstance(text, str):
            raise BadLine(f"a turn is of nobody known, or no text: {json.dumps(turn)[:60]}")
        messages.append({"role": role, "content": text})
        if role == "user":
            yield list(messages)


def _time(values: dict[str, Any]) -> Time | None:
    """None if there is none."""
    for name in TIMES:
        if values.get(name) is not None:
            return _time_of(values, name)
    return None


def _time_of(values: dict[str, Any], name: str) -> Time:
    """A number, also in a text, or a time in ISO 8601."""
    value = values[name]
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if is_time(number):
        return Time(float(number), is_of_day=False)
    try:
        return _of_day(datetime.fromisoformat(value))
    except (TypeError, ValueError) as error:
        wanted = "a number or a time such as 2026-01-31T12:00:00"
        raise BadLine(f"{name} must be {wanted}, got {shown(values, name)}") from error


def _of_day(time: datetime) -> Time:
    """Without a time zone, all of a log are of the same."""
    return Time((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp(), is_of_day=True)


def _not_empty(ids: list[int]) -> list[int]:
    if not ids:
        raise BadLine("it has no token ids: a prompt has at least one token")
    return ids
