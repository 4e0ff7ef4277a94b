"""Reads what people have of a server's requests: logs of texts, messages or token ids, in many shapes.

    {"timestamp": 1.5, "messages": [...]}     a request (request_bodies.py), or a part of the line that is one
    {"event": "request.received", "obj": ...} SGLang's log in JSON
    {"conversations": [{"from": "human", ...  ShareGPT, LMSYS, WildChat: a request for each question
    ... Request ID details: ...               the logs of engines in text (engine_lines.py)

Times are numbers or ISO 8601. Lines of other kinds are counted, because engines log other things to the same file. So
are requests that failed, and fields that are not used and may be of effect.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from cpu_prefix_cache.tools.replay.chat_messages import FIELDS as BESIDE_MESSAGES
from cpu_prefix_cache.tools.replay.chat_messages import TURNS, chat_of, questions
from cpu_prefix_cache.tools.replay.engine_lines import failed_id, logged
from cpu_prefix_cache.tools.replay.lines import BadLine, LineReader, parsed_object
from cpu_prefix_cache.tools.replay.log_times import Time, logged_time, time_of
from cpu_prefix_cache.tools.replay.request_bodies import Body, Content, body_of, contents_of
from cpu_prefix_cache.tools.replay.request_fields import REQUEST_IDS
from cpu_prefix_cache.tools.replay.request_outcomes import is_failed
from cpu_prefix_cache.tools.replay.response_chains import ResponseChains
from cpu_prefix_cache.tools.replay.sharing import Apart

RECEIVED = "request.received"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt. `line` and `turn` number it in its file; a turn without a time of its own has that of the first."""

    line: int
    time: Time | None
    content: Content
    apart: Apart = ()
    turn: int = 0


class RequestLog:
    """One file.

    other_lines     lines that are no request
    failed          requests that failed, and are left out
    failed_later    those that were read before a line with their id reported a failure
    ignored         how many requests have a field that was not used, by its name
    """

    def __init__(self, path: str, skip_bad_lines: bool) -> None:
        self.lines = LineReader(path, skip_bad_lines)
        self.other_lines = self.failed = self.failed_later = 0
        self.ignored: Counter[str] = Counter()
        self._chains = ResponseChains()
        self._read_ids: set[str] = set()

    def read(self) -> Iterator[Recorded]:
        """Raises TraceError for a file that cannot be read or holds no requests, and for bad lines."""
        found = 0
        for number, (part, following) in enumerate(pairwise(chain(self.lines.parts(), [None])), 1):
            try:
                requests = list(self._recorded(number, part, following))
            except BadLine as error:
                self.lines.refuse(number, error)
                continue
            found += len(requests)
            yield from requests
        if not found:
            raise self.lines.nothing_found(self.failed)

    def _recorded(self, number: int, part: Any, following: Any) -> Iterator[Recorded]:
        if isinstance(part, bytes) and part.lstrip(b"\xef\xbb\xbf \t").startswith(b"{"):
            part = parsed_object(part)
        if isinstance(part, dict):
            yield from self._of_object(number, part)
        elif request := logged(part, following):
            yield Recorded(number, logged_time(part), request.ids, request.apart)
            self._remember(request.request_id)
        else:
            self.other_lines += 1
            self._count_failure(failed_id(part))

    def _remember(self, id: str | None) -> None:
        if id is not None:
            self._read_ids.add(id)

    def _count_failure(self, id: str | None) -> None:
        """Count the request with this id, if it was read and is not counted yet."""
        if id in self._read_ids:
            self._read_ids.remove(id)
            self.failed_later += 1

    def _of_object(self, number: int, line: dict[str, Any]) -> Iterator[Recorded]:
        if line.get("event", RECEIVED) != RECEIVED:
            self.other_lines += 1
            if is_failed(line):
                self._count_failure(_id_of(line))
            return
        if is_failed(line):
            self.failed += 1
            return
        time, body = time_of(line), body_of(line)
        turns = next((name for name in TURNS if isinstance(body.fields.get(name), list)), None)
        if turns is not None:
            yield from self._conversation(number, time, body, turns)
        else:
            for content in contents_of(body, self._chains, self.ignored):
                yield Recorded(number, time, content, body.apart)
        self._remember(_id_of(line))

    def _conversation(self, number: int, time: Time | None, body: Body, name: str) -> Iterator[Recorded]:
        self.ignored.update(body.unknown((name, *BESIDE_MESSAGES)))
        for turn, (last, messages) in enumerate(questions(body.fields, name)):
            own = time_of(last)
            chat = chat_of(body.fields, messages, self.ignored)
            yield Recorded(number, own or time, chat, body.apart, 0 if own else turn)


def _id_of(line: dict[str, Any]) -> str | None:
    return next((str(line[name]) for name in REQUEST_IDS if line.get(name) is not None), None)
