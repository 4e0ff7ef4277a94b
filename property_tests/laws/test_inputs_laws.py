"""Logs and traces of anything: each field is used, named or refused, and who shares with whom follows from fields."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu_prefix_cache.tools.replay.lines import TraceError
from cpu_prefix_cache.tools.replay.request_logs import RequestLog
from cpu_prefix_cache.tools.replay.traces import read_traces

FIELDS = (
    "timestamp",
    "startTime",
    "messages",
    "prompt",
    "input",
    "text",
    "inputs",
    "token_ids",
    "system",
    "instructions",
    "tools",
    "chat_template_kwargs",
    "previous_response_id",
    "conversation",
    "conversations",
    "model",
    "cache_salt",
    "parameters",
    "status",
    "error",
    "response",
    "body",
    "request",
    "event",
    "data",
    "requests",
    "hash_ids",
    "input_length",
    "session_id",
    "delay",
    "block_size",
    "hash_id_scope",
    "t",
    "in",
    "role",
    "content",
    "type",
)
KEEP_APART = ("model", "cache_salt", "lora_name", "extra_key", "adapter_id")

texts = st.sampled_from(["", "user", "a", "{", "{}", "1"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
)
good = st.sampled_from(
    [
        {"timestamp": 1, "messages": [{"role": "user", "content": "a"}]},
        {"timestamp": 1, "hash_ids": [1], "input_length": 5},
        {"timestamp": 1, "body": {"instructions": "a", "input": "b"}, "response": {"id": "1", "output": []}},
        {"requests": [{"t": 1, "in": 5, "hash_ids": [1]}]},
    ]
)
changed = st.builds(
    lambda line, more: {**line, **more}, good, st.dictionaries(st.sampled_from(FIELDS), values, max_size=4)
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs") / "log"


@given(story=st.lists(changed, min_size=1, max_size=3), indent=st.sampled_from([None, 1]), skip=st.booleans())
def test_whatever_a_file_has_is_read_or_refused_in_a_sentence(
    path: Path, story: list[Any], indent: int | None, skip: bool
) -> None:
    path.write_text("\n".join(json.dumps(line, indent=indent) for line in story))
    with suppress(TraceError):
        list(RequestLog(str(path), skip).read())
    with suppress(TraceError):
        read_traces([str(path)], skip_bad_lines=skip)


@given(extra=st.dictionaries(st.from_regex(r"x_[a-z]{3}", fullmatch=True), st.just(1)), in_body=st.booleans())
def test_a_field_that_nobody_knows_is_named(path: Path, extra: dict[str, int], in_body: bool) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **(extra if in_body else {})}
    path.write_text(json.dumps({"timestamp": 1, "body": body, **({} if in_body else extra)}))
    log = RequestLog(str(path), skip_bad_lines=False)
    assert len(list(log.read())) == 1 and log.ignored == dict.fromkeys(extra, 1)


aparts = st.dictionaries(st.sampled_from(KEEP_APART), st.sampled_from("xy"), max_size=2)
prompts = st.tuples(aparts, st.lists(st.integers(0, 1), min_size=1))


@given(story=st.lists(prompts, min_size=2, max_size=6), field=st.sampled_from(["token_ids", "hash_ids"]))
def test_prompts_share_their_common_beginning_if_all_that_keeps_apart_is_equal_and_else_nothing(
    path: Path, story: list[tuple[dict[str, str], list[int]]], field: str
) -> None:
    rows = [{"timestamp": 1, "input_length": len(ids), field: ids, **apart} for apart, ids in story]
    path.write_text("\n".join(map(json.dumps, rows)))
    read = read_traces([str(path)], block_tokens=1, ids="content").requests
    for (one, ids), first in zip(story, read, strict=True):
        for (other, others), second in zip(story, read, strict=True):
            common = 0
            while one == other and common < min(len(ids), len(others)) and ids[common] == others[common]:
                common += 1
            assert len(set(first.keys) & set(second.keys)) == common
