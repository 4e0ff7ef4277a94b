"""Finds the prompts of a request in its body, and the body in a line of a log.

    prompt_token_ids, token_ids, input_ids            token ids
    messages; input of messages or of a text          a chat
    prompt, text, inputs, text_input                  a text, or several; also token ids

The body may be a part of the line, or JSON in a text of it. A text that stands in a line alone as `text` or `input` is
no prompt: applications log such lines.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cpu_prefix_cache.replay.chat_messages import FIELDS as BESIDE_MESSAGES
from cpu_prefix_cache.replay.chat_messages import Chat, chat_of
from cpu_prefix_cache.replay.engine_lines import not_empty
from cpu_prefix_cache.replay.lines import BadLine, list_of, parsed
from cpu_prefix_cache.replay.request_fields import SIGNS_OF_A_REQUEST, unknown_fields
from cpu_prefix_cache.replay.response_chains import PREVIOUS, ResponseChains
from cpu_prefix_cache.replay.sharing import FIELDS as APART
from cpu_prefix_cache.replay.sharing import Apart, apart_of

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
    """The fields of a request, and the line that they are of; both are one object if the line has nothing else."""

    fields: dict[str, Any]
    line: dict[str, Any]

    @property
    def apart(self) -> Apart:
        parameters = self.fields.get("parameters")  # where TGI has the adapter
        return apart_of(self.fields, parameters if isinstance(parameters, dict) else {}, self.line)

    @property
    def places(self) -> list[dict[str, Any]]:
        return [self.fields] if self.fields is self.line else [self.fields, self.line]

    @property
    def is_surely_a_request(self) -> bool:
        is_part = self.fields is not self.line
        return is_part or not SIGNS_OF_A_REQUEST.isdisjoint(self.line)


def body_of(line: dict[str, Any]) -> Body:
    """Raises BadLine for a body in a text that is not JSON."""
    return Body(_fields(line), line)


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    for name in (*BODIES, *PARTS):
        value = values.get(name)
        if name in BODIES and isinstance(value, str) and value.lstrip().startswith("{"):
            value = parsed(value.encode())
        if isinstance(value, dict):
            return _fields(value)
    return values


def contents_of(body: Body, chains: ResponseChains, ignored: Counter[str]) -> list[Content]:
    """The prompts. Counts in `ignored` what else the request has that may be of effect. Raises BadLine."""
    fields = body.fields
    name = next((name for name in PROMPTS if fields.get(name) is not None), None)
    if name is None:
        raise BadLine(f"it has none of {', '.join(PROMPTS)}")
    is_chat = name == MESSAGES or (name == INPUT and _is_of_messages(fields[name]))
    if is_chat:
        contents: list[Content] = [_chat(body, name, chains, ignored)]
    else:
        contents = list(_texts(body, name))
    used = (*BODIES, *PARTS, *APART, name, *(PROMPTS if name in IDS else ()), *_beside(is_chat or name in IDS))
    ignored.update(set(unknown_fields(body.places, used)))
    return contents


def _beside(is_templated: bool) -> tuple[str, ...]:
    return (*BESIDE_MESSAGES, PREVIOUS) if is_templated else ()


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
