"""Finds the prompts of a request in its body, and the body in a line of a log.

    prompt_token_ids, token_ids, input_ids            token ids
    messages; input of messages or of a text          a chat
    prompt, text, inputs, text_input                  a text, or several; also token ids

The body may be a part of the line, or JSON in a text of it. A text that stands in a line alone as `text` or `input` is
no prompt: applications log such lines.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cpu_prefix_cache.tools.replay.chat_messages import FIELDS as BESIDE_MESSAGES
from cpu_prefix_cache.tools.replay.chat_messages import Chat, chat_of
from cpu_prefix_cache.tools.replay.engine_lines import not_empty
from cpu_prefix_cache.tools.replay.lines import WHAT_IS_READ, BadLine, list_of, parsed
from cpu_prefix_cache.tools.replay.request_fields import SIGNS_OF_A_REQUEST, unknown_fields
from cpu_prefix_cache.tools.replay.response_chains import PREVIOUS, ResponseChains
from cpu_prefix_cache.tools.replay.sharing import FIELDS as APART
from cpu_prefix_cache.tools.replay.sharing import Apart, apart_of

BODIES = ("body", "request", "request_body", "obj", "payload")
PARTS = ("input", "inputs")  # a body if it is an object, and a prompt if not
IDS = ("prompt_token_ids", "token_ids", "input_ids")
MESSAGES, INPUT = "messages", "input"
TEXTS = ("prompt", INPUT, "text", "inputs", "text_input")
BARE = (INPUT, "text")
PROMPTS = (*IDS, MESSAGES, *TEXTS)

Content = str | list[int] | Chat


@dataclass(frozen=True, slots=True)
class Body:
    """The fields of a request. `levels` are the objects that they stand in, from their own to the line; `path` are the
    names that lead there.
    """

    levels: tuple[dict[str, Any], ...]
    path: tuple[str, ...]

    @property
    def fields(self) -> dict[str, Any]:
        return self.levels[0]

    @property
    def line(self) -> dict[str, Any]:
        return self.levels[-1]

    @property
    def apart(self) -> Apart:
        parameters = self.fields.get("parameters")  # where TGI has the adapter
        return apart_of(self.fields, parameters if isinstance(parameters, dict) else {}, *self.levels[1:])

    @property
    def is_surely_a_request(self) -> bool:
        return bool(self.path) or not SIGNS_OF_A_REQUEST.isdisjoint(self.line)

    def unknown(self, used: Iterable[str]) -> set[str]:
        """Names of fields that are not used, and may be of effect. A text that is no body, such as of a URL, is not."""
        no_bodies = (name for name in BODIES if not isinstance(self.line.get(name), dict))
        return set(unknown_fields(self.levels, (*self.path, *no_bodies, *APART, *used)))


def body_of(line: dict[str, Any]) -> Body:
    """Raises BadLine for a body in a text that is not JSON."""
    levels, path = [line], []
    while inner := _inner(levels[0]):
        path.append(inner[0])
        levels.insert(0, inner[1])
    return Body(tuple(levels), tuple(path))


def _inner(values: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    for name in (*BODIES, *PARTS):
        value = values.get(name)
        if name in BODIES and isinstance(value, str) and value.lstrip().startswith("{"):
            value = parsed(value.encode())
        if isinstance(value, dict):
            return name, value
    return None


def contents_of(body: Body, chains: ResponseChains, ignored: Counter[str]) -> list[Content]:
    """The prompts. Counts in `ignored` what else the request has that may be of effect. Raises BadLine."""
    fields = body.fields
    name = next((name for name in PROMPTS if fields.get(name) is not None), None)
    if name is None:
        raise BadLine(f"it has none of {', '.join(PROMPTS)}; {WHAT_IS_READ}")
    is_chat = name == MESSAGES or (name == INPUT and _is_of_messages(fields[name]))
    if is_chat:
        contents: list[Content] = [_chat(body, name, chains, ignored)]
    else:
        contents = list(_texts(body, name))
    prompts = PROMPTS if name in IDS else (name,)  # all of a prompt is in its ids
    beside = (*BESIDE_MESSAGES, PREVIOUS) if is_chat or name in IDS else ()
    ignored.update(body.unknown((*prompts, *beside)))
    return contents


def _is_of_messages(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and (not value or isinstance(value[0], dict)))


def _chat(body: Body, name: str, chains: ResponseChains, ignored: Counter[str]) -> Chat:
    value = body.fields[name]
    if isinstance(value, str):
        _check_not_bare(body, name)
        items = [{"role": "user", "content": value}]
    else:
        items = list_of(body.fields, name, [dict], "messages")
    if not items:
        raise BadLine(f"{name} is empty")
    if isinstance(body.fields.get("conversation"), str | dict):
        raise BadLine("its history is on the server: the conversation that it names is not in the log")
    items = [*chains.history(body.fields), *items]
    chains.add(body.line, items)
    return chat_of(body.fields, items, ignored)


def _texts(body: Body, name: str) -> Iterator[Content]:
    """A text, token ids, or several prompts of either."""
    value = body.fields[name]
    if isinstance(value, str):
        _check_not_bare(body, name)
        yield value
    elif not isinstance(value, list):
        raise BadLine(f"{name} is neither a text nor a list, such as one that names what the server keeps")
    elif not value or isinstance(value[0], int):
        yield not_empty(list_of(body.fields, name, [int], "integers"))
    elif isinstance(value[0], list):
        yield from (list_of({name: ids}, name, [int], "lists of integers") for ids in value)
    else:
        yield from list_of(body.fields, name, [str], "texts, of integers or of messages")


def _check_not_bare(body: Body, name: str) -> None:
    if name in BARE and not body.is_surely_a_request:
        raise BadLine(
            f"a text under {name!r} alone is no prompt: beside one there is a model, a url or numbers of tokens (if it "
            "is one, call it 'prompt')"
        )
