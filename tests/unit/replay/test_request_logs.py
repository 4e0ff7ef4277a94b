"""The use that `convert` makes of each field of a request: part of the prompt, of the key, or a name in the summary."""

import json
from collections import Counter

import pytest

from cpu_prefix_cache.tools.replay.chat_messages import chat_of
from tests.unit.replay.logs import chat

MODEL = {"model": "m"}
ROLES = {"user": 13, "assistant": 14, "tool": 15}


def ids_of(trace):
    return [line["hash_ids"] for line in trace]


def shared(trace):
    """How many blocks at their beginnings the first two requests share."""
    one, two = ids_of(trace)
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def at_times(*bodies):
    return [{"timestamp": at, **body} for at, body in enumerate(bodies)]


def same_as(convert, line, messages, **fields):
    """Whether the line has the tokens of a chat with these messages."""
    code, printed, trace = convert(at_times({**line, **MODEL}, {"messages": messages, **MODEL, **fields}))
    assert code == 0, printed
    one, two = ids_of(trace)
    return one == two


# Parts of the prompt beside the messages


@pytest.mark.parametrize(
    "line",
    [
        {"system": "a b", "messages": chat("c")},
        {"system": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "messages": chat("c")},
        {"instructions": "a b", "input": "c"},
        {"instructions": "a b", "input": [{"role": "user", "content": [{"type": "input_text", "text": "c"}]}]},
        {"body": {"instructions": "a b", "input": [{"type": "message", "role": "user", "content": "c"}]}},
    ],
    ids=str,
)
def test_a_system_prompt_beside_the_messages_is_the_first_of_them(convert, line):
    assert same_as(convert, line, [{"role": "system", "content": "a b"}, *chat("c")])
    assert not same_as(convert, line, chat("c"))


def test_two_requests_share_their_system_prompt(convert):
    _, _, trace = convert(at_times(*({"system": "a b c d", "messages": chat(text), **MODEL} for text in "ef")))
    assert shared(trace) == 1 + 4 + 1  # both roles


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLED = [*chat("a"), {"role": "assistant", "content": "b", "tool_calls": [CALL]}, {"role": "tool", "content": "c"}]


def test_calls_and_results_of_tools_are_those_of_a_chat(convert):
    anthropic = [
        *chat("a"),
        {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "tool_use", "id": "1", "name": "f"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"text": "c"}]}]},
    ]
    assert same_as(convert, {"messages": anthropic}, CALLED)
    items = [
        *chat("a"),
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
    ]
    calls = [CALLED[0], {**CALLED[1], "content": ""}, CALLED[2]]
    assert same_as(convert, {"input": items}, calls) and not same_as(convert, {"input": items}, chat("a"))


def test_thoughts_have_no_place_in_a_template_and_are_named(convert):
    items = [*chat("a"), {"type": "reasoning", "summary": []}]
    parts = [{"role": "user", "content": [{"type": "thinking", "thinking": "b"}, {"type": "text", "text": "a"}]}]
    _, printed, trace = convert(at_times({"input": items, **MODEL}, {"messages": parts, **MODEL}))
    assert "ignored: items of type reasoning (1), parts of type thinking (1)" in printed
    assert ids_of(trace)[0] == ids_of(trace)[1]


# Facts that the server knew


RESPONSES = [
    {"input": "a", "instructions": "d", "response": {"id": "r1", "output": [{"role": "assistant", "content": "b"}]}},
    {"input": "c", "instructions": "e", "previous_response_id": "r1"},
]


def test_a_chain_of_responses_is_joined_without_the_instructions_of_before(convert):
    _, _, trace = convert(at_times(*({**each, **MODEL} for each in RESPONSES)))
    assert trace[1]["input_length"] == 2 + 2 + 2 + 2 + 1
    line = {**RESPONSES[1], "previous_response_id": None}
    joined = [{"role": "system", "content": "e"}, *chat("a", "b", "c")]
    _, _, trace = convert(at_times(*({**each, **MODEL} for each in RESPONSES), {"messages": joined, **MODEL}))
    assert ids_of(trace)[1] == ids_of(trace)[2] and not same_as(convert, line, joined)


@pytest.mark.parametrize(
    "line",
    [
        RESPONSES[1],
        {"input": "c", "conversation": "conv_1"},
        {"input": "c", "conversation": {"id": "conv_1"}},
    ],
    ids=str,
)
def test_a_history_that_is_not_in_the_log_makes_a_bad_line(convert, line):
    code, printed, trace = convert(at_times({**line, **MODEL}))
    assert (code, trace) == (2, []) and "line 1: its history is on the server" in printed


def test_a_prompt_that_is_kept_at_the_server_makes_a_bad_line(convert):
    assert "prompt is neither a text nor a list" in convert(at_times({"prompt": {"id": "pmpt_1"}}))[1]


# Requests that share


@pytest.mark.parametrize(
    "field",
    ["model", "lora_path", "lora_name", "adapter_id", "cache_salt", "extra_key"],
)
@pytest.mark.parametrize("place", ["body", "line"])
def test_equal_prompts_of_different_ones_share_nothing(convert, field, place):
    def line(value):
        return (
            {"token_ids": [1, 2, 3], field: value} if place == "line" else {"body": {"prompt": "a b c", field: value}}
        )

    _, printed, trace = convert(at_times(line("x"), line("y"), line("x")))
    one, other, again = ids_of(trace)
    assert one == again and not set(one) & set(other) and len(other) == 3
    names = " (x, y)" if "salt" not in field and field != "extra_key" else ""
    assert f"requests that differ in these share nothing: {field}: 2{names}" in printed


def test_equal_values_are_not_spoken_of(convert):
    _, printed, trace = convert(at_times(*[{"token_ids": [1, 2, 3], "model": "x", "cache_salt": "s"}] * 2))
    assert shared(trace) == 3 and "share nothing" not in printed


def test_the_adapter_of_tgi_stands_among_its_parameters(convert):
    lines = [{"inputs": "a b c", "parameters": {"adapter_id": name}} for name in "xy"]
    assert shared(convert(at_times(*lines))[2]) == 0
    assert shared(convert(at_times(lines[0], lines[0]))[2]) == 3


DETAILS = (
    "DEBUG 11-24 12:43:5{0} [logger.py:49] Request {0} details: prompt: 'a', prompt_token_ids: [1, 2, 3], shape: None."
)
RECEIVED = "INFO 11-24 12:43:5{0} [logger.py:58] Received request {0}: params: P(), lora_request: {1}."
ADAPTER = "LoRARequest(lora_name='{}', lora_int_id=1, lora_path='/p')"
BEFORE = "INFO 11-24 12:43:5{0} Received request {0}: prompt: 'a', prompt_token_ids: [1, 2], lora_request: {1}."
SGLANG = (
    "[2026-11-24 12:43:5{}] Receive: obj=GenerateReqInput(text='a', input_ids=[1, 2, 3], stream=False, lora_path={})"
)


@pytest.mark.parametrize(
    "lines",
    [
        [
            DETAILS.format(1),
            RECEIVED.format(1, ADAPTER.format("x")),
            DETAILS.format(2),
            RECEIVED.format(2, "None"),
            DETAILS.format(3),
            RECEIVED.format(3, ADAPTER.format("x")),
        ],
        [BEFORE.format(at, name) for at, name in enumerate([ADAPTER.format("x"), "None", ADAPTER.format("x")])],
        [SGLANG.format(at, name) for at, name in enumerate(["'x'", "None", "'x'"])],
    ],
    ids=["vLLM", "vLLM before", "SGLang"],
)
def test_the_adapter_in_an_engines_log_is_of_its_request(convert, lines):
    code, printed, trace = convert(lines, with_tokenizer=False)
    assert code == 0, printed
    one, other, again = ids_of(trace)
    assert one == again and not set(one) & set(other)


# Lines that are no served requests


@pytest.mark.parametrize(
    "failure",
    [
        {"status": 429},
        {"status_code": "500"},
        {"status": "failure"},
        {"error": {"message": "too long"}},
        {"response": {"status_code": 400}},
        {"response": None, "error": "overloaded"},
        {"status": 500.0},
        {"status": "500 Internal Server Error"},
        {"status": "timeout"},
        {"response": {"status": "incomplete"}},
        {"success": False},
        {"response": {"status_code": 200, "body": {"error": {"message": "too long"}}}},
        {"response_body": '{"object": "error", "message": "too long", "code": 400}'},
        {"response_body": 'data: {"error": {"message": "too long"}}\n\ndata: [DONE]\n'},
        {"response_body": 'event: error\ndata: {"type": "error"}\n'},
        {"response": {"choices": [{"finish_reason": "abort", "message": {"content": ""}}]}},
        {"response": {"choices": [{"finish_reason": "error", "text": ""}], "usage": {"completion_tokens": 0}}},
        {"response": {"choices": [{"error": {"code": 502}, "message": {"content": None}}]}},
        {"response": {"choices": [{"finish_reason": "content_filter", "message": {"content": ""}}]}},
        {"response": {"meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 0}, "text": ""}},
        {"response": {"finish_reason": {"type": "stop", "status_code": 400}}},
        {"response": {"stop_reason": "refusal", "content": [], "usage": {"output_tokens": 0}}},
        {"response": {"status": "failed", "output": []}},
        {"response": {"status": "cancelled", "output": []}},
        {"response": {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}, "output": []}},
        {"finish_reason": "abort"},
        {"finish_reason": "abort", "usage": {"prompt_tokens": 2, "completion_tokens": 0}},
        {"finish_reason": "abort", "response": ""},
        {"finish_reason": "abort", "response_body": "data: [DONE]\n"},
        {"response": '{"object": "error", "message": "too long"}'},
        {"response": '{"choices": [{"finish_reason": "abort", "text": ""}]}'},
        {"response": 'data: {"choices": []}\n\ndata: {"error": {"message": "too long"}}\n'},
        {"response": {"status_code": 200, "body": '{"error": "too long"}'}},
        {"response": {"status": "cancelled", "output": [], "reasoning": {"effort": "low"}, "text": {"format": {}}}},
        {"response": {"choices": [{"finish_reason": "abort", "delta": {"role": "assistant", "content": ""}}]}},
        {"response_body": '{"response": "", "done": false}\n{"error": "out of memory"}\n'},
        {"error": {"code": 0, "message": "too long"}, "usage": {"completion_tokens": 3}},
        {"status": 500, "response": {"output_text": "a"}},
        {"status": "failure", "response": "Internal Server Error"},
        {"payload": {"token_ids": [1, 2], "status": 503}},
    ],
    ids=str,
)
def test_failed_requests_are_left_out_and_counted(convert, failure):
    served = {
        "token_ids": [1, 2],
        "status": 200,
        "success": True,
        "error": None,
        "response": {"status_code": 200, "error": None},
    }
    code, printed, trace = convert(at_times(served, {"token_ids": [1, 2], **failure}, {**served, "error": "-"}))
    assert code == 0 and len(trace) == 2 and "requests that failed and were left out: 1" in printed


@pytest.mark.parametrize(
    "answer",
    [
        {"response": {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}},
        {"response": {"status": "incomplete", "output": [{"type": "message"}]}},
        {"response": {"status": "cancelled", "usage": {"output_tokens": 7}}},
        {"response": {"choices": [{"finish_reason": "abort", "message": {"content": "a"}}]}},
        {"response": {"choices": [{"finish_reason": "content_filter", "message": {"tool_calls": [{"id": "1"}]}}]}},
        {"response": {"meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 3}}},
        {"response_body": 'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: {"status": "cancelled"}\n'},
        {"status": "cancelled", "usage": {"completion_tokens": 1}},
        {"finish_reason": "abort", "output": "a"},
        {"finish_reason": "stop", "usage": {"completion_tokens": 0}},
        {"response": {"status": "in_progress", "error": None}},
        {"response": "plain text"},
        {"response_body": "{"},
        {"finish_reason": "abort", "response": "a"},
        {"finish_reason": "abort", "response": '{"a": 1}'},
        {"finish_reason": "abort", "response_body": "a"},
        {"finish_reason": "abort", "generated_text": "a"},
        {"finish_reason": "abort", "output_text": "a"},
        {"response": {"choices": [{"finish_reason": "abort", "message": {"content": None, "reasoning": "a"}}]}},
        {"response": {"choices": [{"finish_reason": "content_filter", "message": {"function_call": {"name": "f"}}}]}},
        {"response": {"choices": [{"finish_reason": "content_filter", "message": {"refusal": "a"}}]}},
        {"response": {"choices": [{"finish_reason": "abort", "message": {"audio": {"data": "a"}}}]}},
        {"response_body": 'data: {"delta": {"thinking": "a"}}\n\ndata: {"delta": {"stop_reason": "refusal"}}\n'},
        {"response_body": 'data: {"delta": {"partial_json": "{"}}\n\ndata: {"delta": {"stop_reason": "refusal"}}\n'},
        {"response_body": '{"response": "a", "done": false}\n{"error": "out of memory"}\n'},
        {"response_body": 'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: {"error": {"message": "b"}}\n'},
        {"response": {"choices": [{"finish_reason": "error", "text": ""}], "usage": {"completion_tokens": 50}}},
        {"response": {"choices": [{"finish_reason": "error", "text": ""}, {"finish_reason": "stop", "text": "a"}]}},
        {"response": {"choices": [{"error": {"code": None, "message": None}, "message": {"content": None}}]}},
        {"error": {"code": None, "message": ""}},
    ],
    ids=str,
)
def test_an_answer_that_was_cut_short_was_served(convert, answer):
    _, printed, trace = convert(at_times({"token_ids": [1, 2], **answer}, {"prompt": "a", "status": "200 OK"}))
    assert len(trace) == 2 and "failed" not in printed and "ignored" not in printed


@pytest.mark.parametrize(
    "text",
    [
        '{"error": "no such city", "temperature": null}',
        '{"status": "failed"}',
        '{"success": false}',
        '{"type": "error"}',
        'Like this:\ndata: {"error": "x"}\n',
        'data: {"error": "x"}\n',
        "{x for x in y}",
    ],
)
def test_the_text_of_a_model_is_no_answer_of_a_server(convert, text):
    lines = at_times({"token_ids": [1, 2], "response": text}, {"messages": chat("a"), **MODEL, "response": text})
    code, printed, trace = convert(lines)
    assert code == 0 and len(trace) == 2 and "failed" not in printed, printed
    if text.startswith(('{"', "data")):
        _, printed, trace = convert([*at_times({"token_ids": [1, 2], "response_body": text}), lines[1]])
        assert len(trace) == 1 and "requests that failed and were left out: 1" in printed


def test_the_text_of_a_prompt_is_no_answer(convert):
    line = {"model": "m", "text": "a b", "finish_reason": "abort"}
    _, printed, trace = convert(at_times({"prompt": "a"}, line))
    assert len(trace) == 1 and "requests that failed and were left out: 1" in printed


SGLANG_JSON = {"rid": "x", "obj": {"input_ids": [1, 2, 3]}}
SGLANG_RECEIVED = {"timestamp": "2026-11-24T12:43:50", "event": "request.received", **SGLANG_JSON}
ABORTED = {"meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 0}, "text": ""}


@pytest.mark.parametrize(
    ("lines", "later"),
    [
        ([DETAILS.format(1), "INFO 11-24 12:43:51 [async_llm.py:795] Request 1 failed (bad request): too long."], 1),
        ([DETAILS.format(1), "INFO 11-24 12:43:51 [async_llm.py:783] Request 1 aborted."], 0),
        (
            [
                SGLANG_RECEIVED,
                {"timestamp": "2026-11-24T12:43:51", "event": "request.finished", **SGLANG_JSON, "out": ABORTED},
                {"timestamp": "2026-11-24T12:43:51", "event": "request.finished", **SGLANG_JSON, "out": {"text": "a"}},
            ],
            1,
        ),
        ([DETAILS.format(1), *["INFO 11-24 12:43:51 [async_llm.py:1069] Request 1 failed."] * 2], 1),
        ([DETAILS.format(1), "INFO gateway: Request /healthz failed."], 0),
        ([DETAILS.format(1), "INFO 11-24 12:43:51 [async_llm.py:1069] Request 2 failed."], 0),
        (
            [
                DETAILS.format(1),
                'DEBUG 11-24 12:43:51 [logger.py:75] Request 2 JSON body: {"prompt": "Why: Request 1 failed (error)"}',
                "INFO 11-24 12:43:51 [logger.py:99] Generated response 1: output: 'Request 1 failed. Try again'",
            ],
            0,
        ),
        ([SGLANG_RECEIVED, *[{"event": "heartbeat", "error": "metrics endpoint unreachable"}] * 2], 0),
        ([SGLANG_RECEIVED, {"event": "request.finished", **SGLANG_JSON, "rid": "y", "out": ABORTED}], 0),
        ([SGLANG_RECEIVED, *[{"event": "request.finished", **SGLANG_JSON, "out": ABORTED}] * 2], 1),
    ],
    ids=[
        "vLLM failed",
        "vLLM aborted",
        "SGLang",
        "vLLM twice",
        "gateway",
        "vLLM another",
        "vLLM texts",
        "heartbeats",
        "SGLang another",
        "SGLang twice",
    ],
)
def test_a_failure_that_a_later_line_reports_is_in_the_summary(convert, lines, later):
    code, printed, trace = convert(lines, with_tokenizer=False)
    assert code == 0 and len(trace) == 1
    sentence = "requests that are in the trace though a later line says that they failed"
    assert (f"{sentence}: {later}\n" in printed) if later else (sentence not in printed)


@pytest.mark.parametrize("field", ["text", "input"])
def test_the_log_of_an_application_has_no_prompts(convert, field):
    lines = at_times(*[{"level": "INFO", field: "a b c"}] * 5)
    code, printed, trace = convert(lines)
    assert (code, trace) == (2, []) and f"a text under '{field}' alone is no prompt" in printed
    for sign in ({"model": "m"}, {"url": "/generate"}, {"prompt_tokens": 3}, {"sampling_params": {}}):
        assert len(convert([{**line, **sign} for line in lines])[2]) == 5
    assert len(convert([{"timestamp": 1, "body": {field: "a b c"}}])[2]) == 1


# Fields left over are named


def test_a_field_that_may_be_of_effect_is_named_and_one_that_is_not_is_not(convert):
    without = {
        "temperature": 0,
        "max_tokens": 5,
        "stream": True,
        "user": "u",
        "request_time": 0.1,
        "remote_addr": "::1",
    }
    effects = {"continue_final_message": True, "truncate_prompt_tokens": 2, "mystery": 1}
    absent = {"suffix": None, "images": [], "mm_processor_kwargs": {}, "chat_template": ""}
    lines = at_times({"messages": chat("a"), **without, **absent}, {"messages": chat("a"), **effects}, {"prompt": "a"})
    _, printed, _ = convert(lines)
    [line] = [line for line in printed.splitlines() if line.startswith("ignored: ")]
    assert line == "ignored: continue_final_message (1), mystery (1), truncate_prompt_tokens (1)"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sampling_params": {"temperature": 0, "truncate_prompt_tokens": 2}}, "truncate_prompt_tokens"),
        ({"parameters": {"top_n_tokens": 5, "truncate": 2, "adapter_id": "x"}}, "truncate"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"mystery": 0}, "mystery"),
    ],
    ids=str,
)
def test_neither_an_object_of_parameters_nor_a_false_hides_what_may_be_of_effect(convert, fields, name):
    assert f"ignored: {name} (1)\n" in convert(at_times({"prompt": "a", "continue_final_message": False, **fields}))[1]


def test_no_level_of_a_line_is_passed_over(convert):
    def line(model, **fields):
        return {"request": {"model": model, "mystery": 1, "body": {"messages": chat("a b")}}, "secret": 2, **fields}

    _, printed, trace = convert(at_times(line("x"), line("y"), line("y", input="c")))
    assert "ignored: mystery (3), secret (3), input (1)" in printed
    one, other, again = ids_of(trace)
    assert not set(one) & set(other) and other == again


def test_the_system_prompt_of_a_conversation_is_its_first_message(convert):
    conversation = {"conversations": [{"from": "human", "value": "c"}], "system": "a b", "tools": '[{"name": "f"}]'}
    messages = [{"role": "system", "content": "a b"}, *chat("c")]
    assert same_as(convert, conversation, messages, tools=[{"name": "f"}])
    assert same_as(convert, {**conversation, "tools": ""}, messages)


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}},
        {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA},
        {"name": "f", "description": "d", "input_schema": SCHEMA},
    ],
    ids=["chat", "responses", "anthropic"],
)
def test_a_template_gets_tools_in_one_form(tool):
    options = chat_of({"tools": [tool]}, chat("a"), Counter()).options
    function = {"name": "f", "description": "d", "parameters": SCHEMA}
    assert options["tools"] == [{"type": "function", "function": function}]


def test_a_system_prompt_beside_a_plain_text_is_named(convert):
    assert "ignored: system (1)" in convert(at_times({"prompt": "a", "system": "b"}))[1]


def test_fields_that_a_template_may_use_are_used(convert):
    asked = {"messages": chat("a")}
    assert convert(at_times({**asked, "add_generation_prompt": False}))[2][0]["input_length"] == 2
    _, printed, trace = convert(at_times({**asked, "reasoning_effort": "low", "documents": [{"text": "b"}]}))
    assert "ignored" not in printed and trace[0]["input_length"] == 3


# Shapes of files


REQUEST = {"timestamp": 5, "messages": chat("a b c"), **MODEL}
TURNS = [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "d"}]


@pytest.mark.parametrize(
    "line",
    [
        {"timestamp": 5, "payload": {"messages": chat("a b c")}},
        {"timestamp": 5, "request": {"method": "POST", "body": {"messages": chat("a b c")}}},
        {"startTime": "1970-01-01T00:00:05.000Z", "input": {"messages": chat("a b c")}},
        {"startTime": "1970-01-01 00:00:05", "messages": chat("a b c")},
        {"timestamp": 5, "conversation": TURNS},
        {"tstamp": 5, "conversation": [{**turn, "redacted": False} for turn in TURNS]},
        {"timestamp": 5, "inputs": "<|user|> a b c <|assistant|>"},
        {"timestamp": 5, "text_input": "<|user|> a b c <|assistant|>"},
    ],
    ids=str,
)
def test_a_request_is_found_in_the_shapes_of_many_tools(convert, line):
    code, printed, trace = convert([line])
    assert code == 0 and "made up" not in printed and "ignored" not in printed, printed
    again = {**line, "messages": REQUEST["messages"]}
    for name in ("payload", "request", "input", "conversation", "inputs", "text_input"):
        again.pop(name, None)
    assert ids_of(convert([line, again])[2])[1] == ids_of(trace)[0] and len(trace) == 1


@pytest.mark.parametrize("speaker", ["gpt", "chatgpt", "bing", "bard", "Assistant"])
def test_answers_in_conversations_are_of_many_speakers(convert, speaker):
    turns = [
        {"from": who, "value": text} for who, text in (("human", "a"), (speaker, "b"), ("tool", "c"), ("user", "d"))
    ]
    _, _, trace = convert([{"conversations": turns}])
    assert [line["input_length"] for line in trace] == [3, 7, 9]


def test_a_question_has_its_own_time_or_comes_a_pause_after_the_one_before(convert):
    turns = [turn for text in ("a", "b") for turn in chat(text, "c")]
    log = [{"timestamp": "2026-01-01T00:00:00", "conversation": turns}]
    _, printed, trace = convert(log, "--pause", "30")
    assert [line["timestamp"] for line in trace] == [0, 30] and "placed --pause after the one before: 1" in printed
    turns[2]["timestamp"] = "2026-01-01T00:00:07"
    _, printed, trace = convert(log, "--pause", "30")
    assert [line["timestamp"] for line in trace] == [0, 7] and "--pause" not in printed
    numbers = [{"timestamp": 1.7e12 + at, "conversation": chat("a", "b", "c")} for at in (0, 1000)]
    assert [line["timestamp"] for line in convert(numbers, "--pause", "30")[2]] == [0, 1, 30, 31]


@pytest.mark.parametrize(
    "value", [REQUEST, [REQUEST], {"data": [REQUEST], "object": "list"}], ids=["one", "list", "data"]
)
@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_may_be_one_value_over_several_lines(convert, value, indent):
    code, printed, trace = convert([json.dumps(value, indent=indent)])
    assert code == 0 and len(trace) == 1, printed
    assert trace == convert([json.dumps(REQUEST)])[2]


def test_a_file_that_only_begins_like_an_object_is_read_line_by_line(convert):
    code, printed, _ = convert(['{"timestamp": 1, "prompt": "a', json.dumps(REQUEST)])
    assert code == 2 and "line 1: it is not JSON" in printed
    assert len(convert(['{"timestamp": 1, "prompt": "a', json.dumps(REQUEST)], "--skip-bad-lines")[2]) == 1


def test_a_sentence_with_a_comma_is_no_csv(convert):
    assert "CSV" not in convert(["Triton is installed, but not used.", "INFO: nothing here"])[1]


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n", "it looks like CSV"),
        (b"PAR1\x15\x04\x15", "it is Parquet: write it as JSON lines first"),
        (b"\xfd7zXZ\x00\x00\x04", "it is packed with xz: unpack it first"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "it is packed with zstd: unpack it first"),
        (b"\x1f\x8b\x08\x00", "it is packed with gzip: unpack it first"),
        (b'{"timestamp": 1, "token_ids": [1], "status": 500}', "has no requests, but 1 that failed"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "replay"])
def test_a_file_of_another_format_is_called_by_its_name(tmp_path, run, first, sentence, command):
    (tmp_path / "log").write_bytes(first)
    out = ["--out", str(tmp_path / "trace")] if command == "convert" else []
    code, printed = run(command, str(tmp_path / "log"), *out)
    assert code == 2 and sentence in printed and printed.count("\n") == 1
