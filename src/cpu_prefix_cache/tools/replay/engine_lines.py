"""Reads the token ids of a request from a line of an engine's log in text, and the adapter that it was for.

... Request ID details: ... prompt_token_ids: [...]         vLLM at level DEBUG; the line after it, which begins
... Received request ID: ... lora_request: LoRARequest(...  "Received request" and has the same ID, has the adapter
... Request ID failed (bad request): ...                    vLLM, on a request that it has logged before
... Receive: obj=GenerateReqInput(... lora_path='x', ...    SGLang
"""

import json
import re
from typing import NamedTuple

from cpu_prefix_cache.tools.replay.lines import BadLine
from cpu_prefix_cache.tools.replay.sharing import Apart

# Texts come before the ids in these lines, so the last match is the right one.
VLLM_IDS = re.compile(rb"(?:Request|Received request) (?P<id>\S+?):? .*prompt_token_ids: (?P<ids>\[[\d, ]*\]|None)")
SGLANG_IDS = re.compile(rb"Receive: obj=GenerateReqInput\(.*input_ids=(?P<ids>\[[\d, ]*\](?: \.\.\. \[)?|None)")
VLLM_FAILED = re.compile(rb"[^'\"]*?\bRequest (?P<id>\S+) failed(?: \(| due to |\.)")  # quotes begin texts
VLLM_ADAPTER = re.compile(rb".*lora_request: LoRARequest\(.*?lora_name='([^']*)'")
SGLANG_APART = {
    name: re.compile(rb".*\b%b='([^']+)'" % name.encode()) for name in ("lora_path", "lora_id", "extra_key")
}


class Logged(NamedTuple):
    """The token ids of a prompt, what keeps them apart from those of others, and the request's own id, if known."""

    ids: list[int]
    apart: Apart
    request_id: str | None = None


def logged(line: bytes, following: object) -> Logged | None:
    """The request of this line; None if it is about something else. `following` is the line below it.

    Raises BadLine for a request that was logged without all of its ids.
    """
    if match := VLLM_IDS.search(line):
        apart = _vllm_apart(line[match.end() :], match["id"], following)
        return Logged(_ids(match["ids"]), apart, _text(match["id"]))
    if match := SGLANG_IDS.search(line):
        rest = line[match.end() :]
        found = {name: pattern.match(rest) for name, pattern in SGLANG_APART.items()}
        return Logged(_ids(match["ids"]), tuple((name, each[1].decode()) for name, each in found.items() if each))
    return None


def failed_id(line: bytes) -> str | None:
    """The id of a request that has failed after it was logged; None if the line is about something else."""
    match = VLLM_FAILED.match(line)
    return _text(match["id"]) if match else None


def _text(id: bytes) -> str:
    return id.decode(errors="replace")


def _vllm_apart(rest: bytes, id: bytes, following: object) -> Apart:
    if isinstance(following, bytes) and b"Received request " + id + b":" in following:
        rest += following
    match = VLLM_ADAPTER.match(rest.replace(b"\n", b" "))
    return (("lora_name", match[1].decode()),) if match else ()


def _ids(text: bytes) -> list[int]:
    if text == b"None":
        raise BadLine("it was logged without token ids")
    if b"..." in text:
        raise BadLine("its token ids were cut when they were logged")
    ids: list[int] = json.loads(text)
    return not_empty(ids)


def not_empty(ids: list[int]) -> list[int]:
    """Raises BadLine for no ids."""
    if not ids:
        raise BadLine("it has no token ids: a prompt has at least one token")
    return ids
