"""`convert`, from logs of servers to traces: requests that share a prefix, and their times."""

import gzip
import importlib.util
import json
import re

import pytest

from cpu_prefix_cache.tools.cli import main
from cpu_prefix_cache.tools.replay.chat_messages import Chat
from cpu_prefix_cache.tools.replay.tokenizer import FolderTokenizer
from cpu_prefix_cache.tools.replay.traces import read_traces
from tests.unit.replay.logs import chat
from tests.unit.replay.traces import write


def test_token_ids_become_numbers_of_whole_blocks(convert):
    ids = [list(range(10)), [*range(8), 99, 98]]
    lines = [{"timestamp": at, "prompt_token_ids": each} for at, each in enumerate(ids)]
    code, printed, trace = convert(lines, block_tokens=4, with_tokenizer=False)
    assert code == 0 and "2 requests of 20 tokens, 4 whole blocks of 4 tokens, 2 of them different" in printed
    assert trace == [{"timestamp": float(at), "input_length": 10, "hash_ids": [0, 1]} for at in (0, 1)]


def test_replay_reads_a_converted_trace_with_the_same_blocks(convert, tmp_path):
    ids = [list(range(start, start + 100)) for start in (0, 0, 7)]
    lines = [{"timestamp": at, "token_ids": each} for at, each in enumerate(ids)]
    convert(lines, block_tokens=16, with_tokenizer=False)
    made, direct = read_traces([str(tmp_path / "trace")]), read_traces([str(tmp_path / "log")])
    assert (made.block_tokens, made.blocks, made.different_blocks, made.tokens) == (16, 18, 12, 300)
    assert (direct.blocks, direct.different_blocks, direct.tokens) == (18, 12, 300)
    assert [request.now for request in made.requests] == [request.now for request in direct.requests]


def test_a_chat_becomes_the_tokens_of_its_template(convert):
    lines = [{"timestamp": 0, "messages": chat("a b", "c", "d")}]
    _, _, trace = convert(lines)
    assert trace[0]["input_length"] == 4 + 4  # words and roles, the last of which is to answer


def test_a_conversation_that_goes_on_shares_its_earlier_turns(convert):
    first, second = chat("a b"), chat("a b", "c", "d")
    _, _, trace = convert([{"timestamp": at, "messages": each} for at, each in enumerate((first, second))])
    one, two = (line["hash_ids"] for line in trace)
    assert two[: len(one)] == one and len(two) == len(one) + 4
    other = chat("b a", "c", "d")  # and one that begins otherwise shares nothing but its role
    _, _, trace = convert([{"timestamp": at, "messages": each} for at, each in enumerate((first, other))])
    one, two = (line["hash_ids"] for line in trace)
    assert two[:1] == one[:1] and not set(two[1:]) & set(one)


BODY = {"model": "m", "messages": chat("a b c")}


@pytest.mark.parametrize(
    "line",
    [
        {"created": 5, **BODY},
        {"timestamp": 5, "body": BODY},
        {"time": "5", "request": json.dumps(BODY)},
        {"timestamp": 5.0, "status": 200, "request_time": 0.1, "body": json.dumps(BODY)},
        {"timestamp": "1970-01-01T00:00:05Z", "request_body": json.dumps(BODY)},
        {"timestamp": 5, "request": "POST /v1/chat/completions HTTP/1.1", "request_body": json.dumps(BODY)},
        {"timestamp": 5, "input": chat("a b c")},
        {"timestamp": 5, "messages": [{"role": "user", "content": [{"type": "text", "text": "a b c"}]}]},
        {"timestamp": 5, "prompt": "<|user|> a b c <|assistant|>"},
        {"timestamp": 5, "prompt": [13, 1, 2, 3, 14]},
    ],
    ids=str,
)
def test_a_request_is_found_wherever_it_stands(convert, line):
    code, printed, trace = convert([line])
    assert code == 0, printed
    ids = {"timestamp": 5, "token_ids": [13, 1, 2, 3, 14], **({"model": "m"} if "model" in json.dumps(line) else {})}
    _, _, both = convert([line, {**ids, "timestamp": line.get("timestamp", 5)}])
    assert trace == [{"timestamp": 0.0, "input_length": 5, "hash_ids": [0, 1, 2, 3, 4]}] == both[:1]
    assert both[1:] == both[:1]


def test_several_prompts_of_a_request_are_several(convert):
    assert len(convert([{"timestamp": 0, "prompt": ["a b", "c"]}])[2]) == 2
    assert len(convert([{"timestamp": 0, "prompt": [[1, 2], [3], [4]]}])[2]) == 3


def test_tools_stand_where_the_template_puts_them(convert):
    calls = [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    messages = [*chat("a"), {"role": "assistant", "content": "b", "tool_calls": calls}]
    _, _, trace = convert([{"timestamp": 0, "messages": messages, "tools": [{"name": "f"}]}])
    assert trace[0]["input_length"] == 2 + 2 + 3 + 1


@pytest.mark.parametrize("indent", [None, 1])
def test_every_question_of_a_conversation_is_a_request_and_times_are_made_up(convert, indent):
    turns = [{"from": who, "value": text} for who, text in zip(["human", "gpt"] * 2, "abcd", strict=True)]
    conversations = [{"conversations": turns[:2]}, {"conversations": turns}]
    lines = [json.dumps(conversations, indent=indent)]
    code, printed, trace = convert(lines, "--every", "2", "--pause", "30")
    assert code == 0 and "times were made up (--every, --pause)" in printed
    assert [(line["timestamp"], line["input_length"]) for line in trace] == [(0.0, 3), (2.0, 3), (32.0, 7)]
    assert trace[0]["hash_ids"] == trace[1]["hash_ids"] == trace[2]["hash_ids"][:3]
    assert convert([json.dumps(each) for each in conversations], "--every", "2", "--pause", "30")[2] == trace


VLLM = (
    "(APIServer pid=7) DEBUG 11-24 12:43:{:02} [logger.py:49] Request cmpl-1-0 details: prompt: 'prompt_token_ids: "
    "[9, 9] {{', prompt_token_ids: [1, 2, 3], prompt_embeds shape: None."
)
SGLANG = (
    "[2026-11-24 12:43:{:02}] Receive: obj=GenerateReqInput(rid='1', text='input_ids=[9]', input_ids=[1, 2, 3], "
    "sampling_params={{'temperature': 0}})"
)
RECEIVED = {"timestamp": "2026-11-24T12:43:50.25", "event": "request.received", "rid": "1"}


@pytest.mark.parametrize("line", [VLLM, SGLANG], ids=["vLLM", "SGLang"])
def test_the_log_of_an_engine_has_other_lines_too(convert, line):
    lines = ["INFO: started", line.format(50), "[2026] Prefill batch", line.format(52)]
    code, printed, trace = convert(lines, with_tokenizer=False)
    assert code == 0 and "lines without a request: 2" in printed
    assert trace == [{"timestamp": at, "input_length": 3, "hash_ids": [0, 1, 2]} for at in (0.0, 2.0)]


def test_the_log_of_sglang_in_json_has_each_request_twice(convert):
    received = {**RECEIVED, "obj": {"text": "a b", "input_ids": [1, 2, 3]}}
    lines = [received, {**received, "event": "request.finished"}, {**received, "timestamp": "2026-11-24T12:43:51"}]
    _, printed, trace = convert(lines, with_tokenizer=False)
    assert [line["timestamp"] for line in trace] == [0.0, 0.75] and "lines without a request: 1" in printed


@pytest.mark.parametrize(
    ("times", "unit", "seconds"),
    [
        ([0, 3_600_000], [], 3600),
        ([0, 3_600], [], 3600),
        ([1.7e9, 1.7e9 + 3e6], [], 3e6),  # a month, in seconds since 1970
        ([1.7e12, 1.7e12 + 3e6], [], 3e3),
        ([0, 3_600], ["--time-unit", "ms"], 3.6),
        (["2026-01-01T00:00:00", "2026-02-01T00:00:00"], [], 31 * 86_400),
        (["2026-01-01T00:00:00+01:00", "2026-01-01T00:00:02Z"], [], 3602),
    ],
)
def test_replay_takes_times_for_what_they_are(convert, tmp_path, times, unit, seconds):
    convert([{"timestamp": at, "token_ids": [1, 2]} for at in reversed(times)], *unit, with_tokenizer=False)
    trace = read_traces([str(tmp_path / "trace")])
    assert [request.now for request in trace.requests] == [0, pytest.approx(seconds)] and not trace.out_of_order


def test_a_gz_log_reads_like_the_plain_one(convert, tmp_path, tokenizer):
    _, _, trace = convert([{"timestamp": 0, "messages": chat("a")}])
    (tmp_path / "log.gz").write_bytes(gzip.compress((tmp_path / "log").read_bytes()))
    out = tmp_path / "again"
    assert main(["convert", str(tmp_path / "log.gz"), "--out", str(out), "--tokenizer", str(tokenizer)]) == 0
    assert [json.loads(line)["input_length"] for line in out.read_text().splitlines()] == [trace[0]["input_length"]]


GOOD = {"timestamp": 0, "token_ids": [1, 2]}
BAD_LINES = [
    ("{", "it is not JSON"),
    ({"timestamp": 1}, "it has none of prompt_token_ids, token_ids, input_ids, messages, prompt, input, text"),
    ({"timestamp": "noon", "token_ids": [1]}, 'timestamp must be a number or a time such as .* got "noon"'),
    ({"timestamp": -1, "token_ids": [1]}, "timestamp must be a number or a time"),
    ({"token_ids": [1]}, "its time is missing, and those before are a number"),
    ({"timestamp": "2026-01-01", "token_ids": [1]}, "its time is a time of the day, and those before are a number"),
    ({"timestamp": 1, "token_ids": []}, "no token ids: a prompt has at least one token"),
    ({"timestamp": 1, "token_ids": [1, "..."]}, "token_ids must be a list of integers"),
    ({"timestamp": 1, "token_ids": [-1]}, "tokens must be integers from 0"),
    ({"timestamp": 1, "messages": []}, "messages is empty"),
    ({"timestamp": 1, "messages": ["a"]}, "messages must be a list of messages"),
    ({"timestamp": 1, "messages": [{"content": "a"}]}, "a message has no role"),
    ({"timestamp": 1, "messages": [{"role": "odd", "content": "a"}]}, "the chat template refuses it: no such role"),
    (
        {"timestamp": 1, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        'a part of a message is no text, but "image_url"',
    ),
    ({"timestamp": 1, "messages": chat("a"), "chat_template_kwargs": 3}, "chat_template_kwargs must be an object"),
    ({"timestamp": 1, "prompt": ""}, "its text has no tokens"),
    ({"timestamp": 1, "prompt": "\ud800"}, "its text is not Unicode"),
    ({"timestamp": 1, "messages": chat("\ud800")}, "its text is not Unicode"),
    ({"timestamp": 1, "prompt": ["a", 1]}, "prompt must be a list of texts"),
    ({"timestamp": 1, "body": "{"}, "it is not JSON"),
    ({"timestamp": 1, "conversations": [{"from": "cat", "value": "a"}]}, 'unknown role "cat"; known are human, user'),
    ({"timestamp": 1, "conversations": [{"from": "gpt", "value": 1}]}, "a turn has no text"),
    (VLLM.format(50).replace("[1, 2, 3]", "None"), "it was logged without token ids"),
    (SGLANG.format(50).replace("[1, 2, 3]", "[1, 2] ... [3]"), "its token ids were cut when they were logged"),
    (VLLM.format(50).replace("11-24", "13-99"), "its time is none"),
]


@pytest.mark.parametrize(("line", "complaint"), BAD_LINES, ids=[complaint for _, complaint in BAD_LINES])
def test_a_bad_line_is_named_and_stops_it_unless_it_is_skipped(convert, line, complaint):
    code, printed, trace = convert([GOOD, line, GOOD])
    assert (code, trace, printed.count("\n")) == (2, [], 1)
    assert re.search(rf"log, line 2: .*{complaint}", printed), printed
    code, printed, trace = convert([GOOD, line, GOOD], "--skip-bad-lines")
    assert (code, len(trace)) == (0, 2) and "bad lines that were skipped: 1, the first: " in printed


@pytest.mark.parametrize(
    ("lines", "options", "sentence"),
    [
        ([], [], "has no requests"),
        (["INFO: nothing here"], [], "has no requests"),
        ([{"timestamp": 0, "prompt": "a"}], [], "give the model's folder by --tokenizer"),
        ([GOOD], ["--tokenizer", "no/such/folder"], "--tokenizer is the folder of a model; there is no"),
        ([GOOD], ["--chat-template", "x"], "--chat-template is for --tokenizer"),
        ([GOOD], ["--out", "."], "which is a folder or a device"),
        ([GOOD], ["--out", "/dev/null"], "which is a folder or a device: give a file's name"),
        ([GOOD], ["--out", "no/such/folder/trace"], "there is no such folder"),
        (["[1, 2]"], [], "has no requests"),
        (["[", "{]"], [], "begins like a list, and it is not JSON"),
        (["[", "1]"], [], "is a list of something else than JSON objects"),
    ],
    ids=str,
)
def test_logs_that_cannot_be_converted_are_refused_in_a_sentence_and_nothing_is_written(
    convert, lines, options, sentence
):
    code, printed, trace = convert(lines, *options, with_tokenizer=False)
    assert (code, trace, printed.count("\n")) == (2, [], 1) and sentence in printed


def test_the_log_itself_is_not_overwritten(tmp_path, capsys):
    log = write(tmp_path / "log", [GOOD])
    assert main(["convert", log, "--out", log]) == 2
    assert "would overwrite the log" in capsys.readouterr().err and json.loads((tmp_path / "log").read_text()) == GOOD


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"tokenizer.json": "{}"}, "is no tokenizer"),
        ({"tokenizer_config.json": "["}, "cannot be read"),
        ({"tokenizer_config.json": "{}"}, "has no chat template for messages: give --chat-template FILE"),
        ({"chat_template.jinja": "{% if %}"}, "the chat template is not Jinja"),
    ],
    ids=str,
)
def test_a_folder_of_a_model_that_will_not_do_is_refused(tmp_path, capsys, tokenizer, files, sentence):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text((tokenizer / "tokenizer.json").read_text())
    for name, text in files.items():
        (folder / name).write_text(text)
    log = write(tmp_path / "log", [{"timestamp": 0, "messages": chat("a")}])
    assert main(["convert", log, "--out", str(tmp_path / "trace"), "--tokenizer", str(folder)]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and printed.count("\n") == 1


ODD_TEMPLATE = """
{%- for message in messages %}
    {%- if loop.index0 == 3 %}{% break %}{% endif %}
    {%- generation %}<|{{ message.role }}|> {{ message.content | trim }}{% endgeneration %} {{ bos_token }}
    {% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}
{%- if tools %} {{ tools | tojson(indent=2) }} {% endif %}{{ strftime_now("%d") }} {{ deep }}
{%- if add_generation_prompt %} <|assistant|>{% endif %}"""


def test_token_ids_are_those_of_transformers(tokenizer, tmp_path):
    """A template with all that templates of models use beyond Jinja."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text((tokenizer / "tokenizer.json").read_text())
    (folder / "chat_template.jinja").write_text(ODD_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "l"}}))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=ODD_TEMPLATE, bos_token="l"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "<b> &"}}}
    messages = [*chat("a b", " c ", "d"), {"role": "assistant", "content": "e", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "<f>", "description": "d"}}]
    for some in (messages[:1], messages[:3], messages):
        for given in (None, tools):
            text = theirs.apply_chat_template(some, tools=given, add_generation_prompt=True, tokenize=False, deep="g")
            ours = Chat(some, {"tools": given, "deep": "g"})
            assert FolderTokenizer(folder).text(ours) == text and ("<f>" in text) == (given is not None)
            assert FolderTokenizer(folder).ids(ours) == theirs(text, add_special_tokens=False)["input_ids"]
    assert FolderTokenizer(folder).ids("a b") == theirs("a b")["input_ids"]


@pytest.mark.parametrize("missing", ["tokenizers", "jinja2"])
def test_a_missing_library_is_named_with_its_install_command(convert, monkeypatch, missing):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    code, printed, trace = convert([GOOD])
    assert (code, trace) == (2, []) and f"--tokenizer needs {missing}: pip install tokenizers jinja2" in printed
    assert convert([GOOD], with_tokenizer=False)[0] == 0


def test_a_template_of_ones_own_takes_the_place_of_the_models(convert, tmp_path):
    (tmp_path / "own").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    _, _, trace = convert([{"timestamp": 0, "messages": chat("a b")}], "--chat-template", str(tmp_path / "own"))
    assert trace[0]["input_length"] == 2
