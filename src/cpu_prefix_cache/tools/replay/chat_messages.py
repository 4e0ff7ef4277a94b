"""Turns what requests have for a chat template, in the forms of several APIs, into messages as templates take them.

    OpenAI        messages with a role; their content is a text, or parts of which each is a text
    Anthropic     system beside messages; tool_use and tool_result among the parts; tools with input_schema
    Responses     instructions beside the items of input; function_call and function_call_output have no role
    ShareGPT      turns of human, gpt and others, in `value`

What has no place in a template is counted in `ignored`, by name.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cpu_prefix_cache.tools.replay.lines import BadLine, list_of, parsed, shown

Message = dict[str, Any]
OPTIONS = ("tools", "documents", "reasoning_effort", "add_generation_prompt")
BEFORE = ("system", "instructions")
KWARGS = "chat_template_kwargs"
FIELDS = (*OPTIONS, *BEFORE, KWARGS)  # what a chat has beside its messages

THOUGHTS = ("reasoning", "thinking", "redacted_thinking")


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, as chat templates take them, with what else the request gives the template."""

    messages: list[Message]
    options: Mapping[str, Any] = field(default_factory=dict)


def chat_of(body: Mapping[str, Any], items: Iterable[Message], ignored: Counter[str]) -> Chat:
    """Raises BadLine for items that are no messages, and for options that are none."""
    kwargs = body.get(KWARGS) or {}
    if not isinstance(kwargs, dict):
        raise BadLine(f"{KWARGS} must be an object, got {shown(dict(body), KWARGS)}")
    options = {name: body[name] for name in OPTIONS if body.get(name) is not None}
    tools = options.get("tools") or None
    if isinstance(tools, str):
        tools = parsed(tools.encode())
    options["tools"] = [_tool(tool) for tool in tools] if isinstance(tools, list) else tools
    before = [{"role": "system", "content": body[name]} for name in BEFORE if body.get(name)]
    if not all(isinstance(message["content"], str | list) for message in before):
        raise BadLine(f"{' and '.join(BEFORE)} must be a text, or parts that are")
    return Chat(list(messages_of([*before, *items], ignored)), {**options, **kwargs})


def messages_of(items: Iterable[Message], ignored: Counter[str]) -> Iterator[Message]:
    """Calls of tools that follow each other are of one message."""
    calls: list[Message] = []
    for item in items:
        if item.get("type") == "function_call":
            calls.append(_call(item.get("call_id"), item.get("name"), item.get("arguments")))
            continue
        if calls:
            yield {"role": "assistant", "content": "", "tool_calls": calls}
            calls = []
        yield from _messages(item, ignored)
    if calls:
        yield {"role": "assistant", "content": "", "tool_calls": calls}


def _messages(item: Message, ignored: Counter[str]) -> Iterator[Message]:
    kind = item.get("type")
    if isinstance(item.get("role"), str):
        yield from _of_role(item, ignored)
    elif kind == "function_call_output":
        yield _result(item.get("call_id"), item.get("output"))
    elif kind in THOUGHTS:
        ignored[f"items of type {kind}"] += 1
    elif kind is None:
        raise BadLine("a message has no role")
    else:
        raise BadLine(f"an item of type {json.dumps(kind)[:40]} is no message")


def _of_role(message: Message, ignored: Counter[str]) -> Iterator[Message]:
    """With its parts of text joined, and its parts that are results of tools before it."""
    parts = message.get("content")
    if not isinstance(parts, list):
        yield message
        return
    texts, calls, results = [], [], []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else part
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "tool_use":
            calls.append(_call(part.get("id"), part.get("name"), part.get("input")))
        elif kind == "tool_result":
            results.append(_result(part.get("tool_use_id"), part.get("content")))
        elif kind in THOUGHTS:
            ignored[f"parts of type {kind}"] += 1
        else:
            raise BadLine(f"a part of a message is no text, but {json.dumps(kind)[:40]}")
    yield from results
    if texts or calls or not results:
        yield {**message, "content": "".join(texts), **({"tool_calls": calls} if calls else {})}


def _call(id: Any, name: Any, arguments: Any) -> Message:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def _result(id: Any, content: Any) -> Message:
    """`content` is a text, or parts of it."""
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise BadLine("the result of a tool is no text")
    return {"role": "tool", "tool_call_id": id, "content": "".join(part["text"] for part in parts)}


def _tool(tool: Any) -> Any:
    """As the chat API has it: Anthropic and Responses have a function's fields beside its name."""
    if not isinstance(tool, dict) or "function" in tool or not {"input_schema", "parameters"} & tool.keys():
        return tool
    names = {"name": "name", "description": "description", "input_schema": "parameters", "parameters": "parameters"}
    return {"type": "function", "function": {to: tool[name] for name, to in names.items() if name in tool}}


# Conversations, as data sets have them

TURNS = ("conversations", "conversation")
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "function_call": "assistant",
    "system": "system",
}


def questions(values: dict[str, Any], name: str) -> Iterator[tuple[Message, list[Message]]]:
    """Each turn that is answered, and the messages up to it. Raises BadLine."""
    messages: list[Message] = []
    for turn in list_of(values, name, [dict], "turns"):
        speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        role = SPEAKERS.get(str(speaker).lower())
        if role is None:
            raise BadLine(f"unknown role {json.dumps(speaker)[:40]}; known are {', '.join(SPEAKERS)}")
        if not isinstance(text, str):
            raise BadLine(f"a turn has no text: {json.dumps(turn)[:60]}")
        messages.append({"role": role, "content": text})
        if role in ("user", "tool"):
            yield turn, list(messages)
