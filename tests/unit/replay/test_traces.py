"""Lines that are requests, lines that are none, and requests that share a prefix."""

import gzip
import json
import random

import pytest

from cpu_prefix_cache.model.hashing import ChainHasher
from cpu_prefix_cache.tools.replay.describe import describe_trace
from cpu_prefix_cache.tools.replay.traces import TraceError, read_traces
from tests.unit.replay.traces import mooncake_lines, write

GOOD = {"timestamp": 1500, "input_length": 1100, "output_length": 9, "hash_ids": [7, 8, 9]}


def test_a_mooncake_line_is_a_prompt_of_blocks_of_512_tokens(tmp_path):
    trace = read_traces([write(tmp_path / "a.jsonl", [GOOD])])
    assert trace.block_tokens == 512
    assert [(request.now, len(request.keys), request.tokens) for request in trace.requests] == [(1.5, 3, 1100)]
    assert (trace.blocks, trace.tokens, trace.different_blocks) == (3, 1100, 3)


def test_an_id_has_one_key_and_it_is_the_same_object(tmp_path):
    trace = read_traces([write(tmp_path / "a.jsonl", mooncake_lines(["abc", "abd"]))])
    first, second = (request.keys for request in trace.requests)
    assert all(a is b for a, b in zip(first[:2], second[:2], strict=True))
    assert first[2] != second[2]
    assert {len(key) for key in first} == {16}


def test_a_gz_file_reads_like_the_plain_one(tmp_path):
    plain = write(tmp_path / "a.jsonl", mooncake_lines(["abc", "ab"]))
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert read_traces([str(packed)]).requests == read_traces([plain]).requests


def test_ids_of_different_files_are_different_blocks_and_requests_come_in_the_order_of_time(tmp_path):
    one = write(tmp_path / "one", [{**GOOD, "timestamp": at} for at in (0, 20, 20)])
    two = write(tmp_path / "two", [{**GOOD, "timestamp": at, "input_length": 1200} for at in (10, 20)])
    trace = read_traces([one, two], time_unit="ms")
    assert trace.different_blocks == 6
    assert [(round(request.now * 1000), request.tokens) for request in trace.requests] == [
        (0, 1100),
        (10, 1200),
        (20, 1100),
        (20, 1100),
        (20, 1200),
    ]


def test_a_log_out_of_order_is_replayed_in_the_order_of_time_and_cut_there(tmp_path):
    log = write(tmp_path / "log", [{**GOOD, "timestamp": at} for at in (30, 10, 20)])
    trace = read_traces([log], limit=2, time_unit="ms")
    assert [request.now for request in trace.requests] == [0.01, 0.02]
    assert (trace.out_of_order, read_traces([log, log]).out_of_order) == (1, 2)


def test_ids_may_be_texts_which_are_no_numbers(tmp_path):
    digests = [{**GOOD, "hash_ids": ids} for ids in (["7", "8", "9"], ["7", "8", "a3"])]
    trace = read_traces([write(tmp_path / "log", digests)])
    assert (trace.blocks, trace.different_blocks) == (6, 4)
    with pytest.raises(TraceError, match="id a3 follows 7 here and follows 8 before"):
        read_traces([write(tmp_path / "log", [*digests, {**GOOD, "hash_ids": ["7", "a3"]}])])
    mixed = [GOOD, {**GOOD, "hash_ids": ["7", "8", "9"]}]
    assert read_traces([write(tmp_path / "log", mixed)]).different_blocks == 6


@pytest.mark.parametrize("size", [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("is_cut", [False, True])
def test_the_size_of_blocks_is_guessed_with_or_without_the_last_one(tmp_path, size, is_cut):
    lengths = [10 * size + 1, 20 * size - 1, 15 * size]
    counts = [length // size if is_cut else -(-length // size) for length in lengths]
    lines = [
        {"timestamp": 0, "input_length": length, "hash_ids": list(range(100 * at, 100 * at + count))}
        for at, (length, count) in enumerate(zip(lengths, counts, strict=True))
    ]
    trace = read_traces([write(tmp_path / "log", lines)])
    assert (trace.block_tokens, trace.is_size_guessed, trace.odd_lengths) == (size, True, 0)
    said = read_traces([write(tmp_path / "log", lines)], block_tokens=3)
    assert (said.block_tokens, said.is_size_guessed) == (3, False)


HOUR = 3_600


@pytest.mark.parametrize(
    ("timestamps", "unit", "seconds"),
    [
        ([0, 1_000 * HOUR], "ms", HOUR),
        ([0, HOUR], "s", HOUR),
        ([0.25, HOUR + 0.25], "s", HOUR),
        ([1.7e9, 1.7e9 + HOUR], "s", HOUR),  # since 1970
        ([1.7e12, 1.7e12 + 1_000 * HOUR], "ms", HOUR),
        ([1.7e9, 1.7e9 + 1_000 * HOUR], "s", 1_000 * HOUR),
        ([1.7e12, 1.7e12 + 4_000], "ms", 4),
        ([0, 599_999], "s", 599_999),
        ([0, 600_000], "ms", 600),
        ([5, 5], "ms", 0),
    ],
)
def test_seconds_are_distinguished_from_milliseconds_by_the_length_of_the_log(tmp_path, timestamps, unit, seconds):
    log = write(tmp_path / "log", [{**GOOD, "timestamp": at} for at in timestamps])
    trace = read_traces([log])
    first, last = (request.now for request in trace.requests)
    assert (trace.time_unit, last - first) == (unit, seconds)
    assert trace.guessed_from == timestamps[1] - timestamps[0]


def test_the_unit_is_guessed_from_all_that_was_read_and_is_one_for_all_files(tmp_path):
    """However few requests are replayed of it, and though one file alone is short."""
    long = write(tmp_path / "long", [{**GOOD, "timestamp": at} for at in (0, 2_000, 1_000 * HOUR)])
    short = write(tmp_path / "short", [{**GOOD, "timestamp": at} for at in (1_000, 3_000)])
    trace = read_traces([short, long], limit=4)
    assert [request.now for request in trace.requests] == [0, 1, 2, 3]


@pytest.mark.parametrize(("unit", "seconds"), [("s", HOUR), ("ms", HOUR / 1_000)])
def test_a_unit_that_was_given_is_not_guessed(tmp_path, unit, seconds):
    log = write(tmp_path / "log", [{**GOOD, "timestamp": at} for at in (0, HOUR)])
    trace = read_traces([log], time_unit=unit)
    assert (trace.requests[1].now, trace.time_unit, trace.guessed_from) == (seconds, unit, None)


@pytest.mark.parametrize("name", ["token_ids", "prompt_token_ids"])
def test_token_ids_are_hashed_in_full_blocks_and_shared_across_files(tmp_path, name):
    tokens = list(range(40))
    one = write(tmp_path / "one", [{"timestamp": 0, name: tokens}])
    two = write(tmp_path / "two", [{"timestamp": 1, name: [*tokens[:32], 99]}])
    trace = read_traces([one, two])
    assert (trace.block_tokens, trace.tokens, trace.different_blocks) == (16, 73, 2)
    assert trace.requests[0].keys == trace.requests[1].keys == ChainHasher(chunk_tokens=16).keys(tokens)
    assert len(read_traces([one], block_tokens=8).requests[0].keys) == 5


def test_blocks_of_different_sizes_share_no_cache_unless_a_size_is_given(tmp_path):
    ids = write(tmp_path / "ids", [GOOD])
    log = write(tmp_path / "log", [{"timestamp": 0, "token_ids": [1] * 512}])
    with pytest.raises(TraceError, match=r"16, 512"):
        read_traces([ids, log])
    assert read_traces([ids, log], block_tokens=512).blocks == 4


def without(name):
    return {key: value for key, value in GOOD.items() if key != name}


BAD = [
    ("{", "not JSON"),
    ("[]", "not a JSON object"),
    ("[" * 100_000, "not JSON"),
    ("", "not JSON"),
    (without("timestamp"), "timestamp must be a number of seconds or ms, 0 or more, got nothing"),
    ({**GOOD, "timestamp": "now"}, 'timestamp must be .* got "now"'),
    ({**GOOD, "timestamp": True}, "timestamp must be"),
    (json.dumps(GOOD).replace("1500", "NaN"), "timestamp must be"),
    (json.dumps(GOOD).replace("1500", "1" + "0" * 400), "timestamp must be"),
    (without("input_length"), "input_length must be a number of tokens of at least 1, got nothing"),
    ({**GOOD, "input_length": -1}, "input_length must be .* got -1"),
    ({**GOOD, "input_length": 0}, "input_length must be .* got 0"),
    ({**GOOD, "output_length": 1.5}, "output_length must be"),
    (without("hash_ids"), "neither hash_ids nor"),
    ({**GOOD, "hash_ids": 7}, "hash_ids must be a list of integers, or of texts"),
    ({**GOOD, "hash_ids": [7, "8"]}, "hash_ids must be a list of integers, or of texts"),
    ({**GOOD, "hash_ids": [7, True]}, "hash_ids must be a list of integers, or of texts"),
    ({"timestamp": 0, "messages": []}, "`convert` reads texts"),
    ({"session_id": "a", "delay": -1}, "delay must be a number of ms, 0 or more, got -1"),
    ({"requests": [1]}, "requests must be a list of requests"),
    ({"requests": [], "hash_id_scope": "odd"}, 'hash_id_scope must be local or global, got "odd"'),
    ({"requests": [], "block_size": 0}, "block_size must be a number of tokens of at least 1, got 0"),
    ({"timestamp": 0, "token_ids": [1] * 16 + [1.0]}, "token_ids must be a list of integers"),
    ({"timestamp": 0, "token_ids": []}, "token_ids is empty"),
    ({"timestamp": 0, "token_ids": [-1] * 16}, "tokens must be integers from 0"),
    ({"timestamp": 0, "prompt_token_ids": [2**32] * 16}, "tokens must be integers from 0"),
]


@pytest.mark.parametrize(("line", "complaint"), BAD, ids=[complaint for _, complaint in BAD])
def test_a_malformed_line_is_named_and_stops_the_run_unless_it_is_skipped(tmp_path, line, complaint):
    path = write(tmp_path / "log.jsonl", [GOOD, line, GOOD])
    with pytest.raises(TraceError, match=rf"log\.jsonl, line 2: .*{complaint}"):
        read_traces([path])
    trace = read_traces([path], skip_bad_lines=True)
    assert len(trace.requests) == 2
    assert len(trace.bad_lines) == 1
    assert "log.jsonl, line 2: " in trace.bad_lines[0]


def test_bytes_that_are_no_text_make_a_bad_line(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"timestamp": "\xff"}\n')
    with pytest.raises(TraceError, match="line 1: it is not JSON"):
        read_traces([str(path)])


def test_empty_lines_at_the_end_are_no_lines(tmp_path):
    assert len(read_traces([write(tmp_path / "log", [GOOD, "", " "])]).requests) == 1


@pytest.mark.parametrize("content", [None, b"", b"\n"])
def test_a_file_without_requests_or_without_a_file_is_refused(tmp_path, content):
    path = tmp_path / "log"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match="No such file" if content is None else "has no requests"):
        read_traces([str(path)])


def test_a_file_of_nothing_but_bad_lines_is_refused_with_the_first_of_them(tmp_path):
    with pytest.raises(TraceError, match=r"no requests, and 2 bad lines, the first: .*log, line 1: it is not JSON"):
        read_traces([write(tmp_path / "log", ["x", "y"])], skip_bad_lines=True)


def test_prompts_without_a_whole_block_are_requests_but_not_a_trace(tmp_path):
    short, long = {"timestamp": 0, "token_ids": [1] * 15}, {"timestamp": 1, "token_ids": [1] * 16}
    assert [len(request.keys) for request in read_traces([write(tmp_path / "a", [short, long])]).requests] == [0, 1]
    with pytest.raises(TraceError, match="no request has a whole block of 16 tokens"):
        read_traces([write(tmp_path / "b", [short])])


def test_a_byte_order_mark_and_other_line_ends_are_no_harm(tmp_path):
    line = json.dumps(GOOD).encode()
    (tmp_path / "log").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n" + line + b"\r\n")
    assert len(read_traces([str(tmp_path / "log")]).requests) == 2


def test_a_damaged_gz_file_is_refused(tmp_path):
    packed = tmp_path / "log.gz"
    whole = gzip.compress(json.dumps(GOOD).encode() * 1000)
    for content in (b"no gzip at all", whole[: len(whole) // 2]):
        packed.write_bytes(content)
        with pytest.raises(TraceError, match="cannot be read"):
            read_traces([str(packed)], skip_bad_lines=True)


def test_lengths_that_do_not_fit_the_number_of_blocks_are_counted(tmp_path):
    lengths = [1024, 1025, 1536, 2047, 2048]  # 3 blocks are 1025 to 1536 tokens, or up to 2047 if full ones are listed
    path = write(tmp_path / "log", [{**GOOD, "input_length": length} for length in lengths])
    assert read_traces([path]).odd_lengths == 2


# Ids that are not chained


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        ([7, 7], "hash_ids names a block twice"),
        ([7, 9], "id 9 follows 7 here and follows 8 before"),
        ([8], "id 8 begins a prompt here and follows 7 before"),
    ],
    ids=str,
)
@pytest.mark.parametrize("skip", [False, True])
def test_unchained_ids_make_no_bad_line_that_could_be_skipped(tmp_path, ids, complaint, skip):
    path = write(tmp_path / "log", [GOOD, {**GOOD, "hash_ids": ids}, GOOD])
    with pytest.raises(TraceError, match=rf"line 2: {complaint}: its ids are not chained \(--ids content") as error:
        read_traces([path], skip_bad_lines=skip)
    assert "--skip-bad-lines" not in str(error.value)
    assert len(read_traces([path], ids="content").requests) == 3


def lengths_shared(prompts):
    """Blocks that each prompt shares from its beginning on with one before it, found by comparing them all."""

    def common(one, two):
        return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))

    return [max((common(prompt, other) for other in prompts[:at]), default=0) for at, prompt in enumerate(prompts)]


@pytest.mark.parametrize("seed", range(5))
def test_ids_of_content_are_chained_exactly(tmp_path, seed):
    draw = random.Random(seed)
    prompts = [[draw.randint(0, 2) for _ in range(draw.randint(1, 8))] for _ in range(60)]
    lines = [{"timestamp": at, "input_length": 16 * len(ids), "hash_ids": ids} for at, ids in enumerate(prompts)]
    trace = read_traces([write(tmp_path / "log", lines)], ids="content")
    known = set()
    for request, shared in zip(trace.requests, lengths_shared(prompts), strict=True):
        assert [key in known for key in request.keys] == [at < shared for at in range(len(request.keys))]
        known.update(request.keys)


def test_chained_ids_that_are_read_as_content_share_the_same(tmp_path):
    path = write(tmp_path / "log", mooncake_lines(["abc", "abd", "abc", "b"]))
    trace, chained = read_traces([path], ids="content"), read_traces([path])
    assert trace.different_blocks == chained.different_blocks == 5


# Requests that share


@pytest.mark.parametrize("field", ["model", "cache_salt", "lora_name", "extra_key"])
@pytest.mark.parametrize("prompt", [GOOD, {"timestamp": 1500, "token_ids": [1] * 48}], ids=["ids", "tokens"])
def test_different_models_adapters_and_salts_share_nothing(tmp_path, field, prompt):
    lines = [{**prompt, field: value} for value in ("x", "y", "x")]
    trace = read_traces([write(tmp_path / "log", lines)])
    one, other, again = (request.keys for request in trace.requests)
    assert one == again and not set(one) & set(other) and len(trace.aparts) == 2
    assert f"requests that differ in these share nothing: {field}: 2" in describe_trace(trace)
    alone = read_traces([write(tmp_path / "log", [{**prompt, field: "x"}] * 3)])
    assert alone.different_blocks == 3 and "share nothing" not in describe_trace(alone)


def test_ids_are_chained_for_each_model_alone(tmp_path):
    path = write(tmp_path / "log", [{**GOOD, "model": "x"}, {**GOOD, "model": "y", "hash_ids": [9, 8, 7]}])
    assert read_traces([path]).different_blocks == 6


def test_failed_requests_are_left_out_and_counted(tmp_path):
    trace = read_traces([write(tmp_path / "log", [GOOD, {**GOOD, "status": 429}, {**GOOD, "finish_reason": "abort"}])])
    assert len(trace.requests) == 1 and "requests that failed and were left out: 2" in describe_trace(trace)


# Rows of other tools


def test_other_names_of_the_fields(tmp_path):
    line = {"created_time": 1500, "input_tokens": 1100, "output_tokens": 9, "hash_ids": [7, 8, 9]}
    [request] = read_traces([write(tmp_path / "log", [line])]).requests
    assert [request] == read_traces([write(tmp_path / "log", [GOOD])]).requests


def test_a_delay_counts_from_the_row_before_it_of_its_session_in_ms(tmp_path):
    row = {"input_length": 1024, "hash_ids": [1, 2]}
    lines = [
        {"session_id": "a", **row},
        {"session_id": "b", "timestamp": 500, **row},
        {"session_id": "a", "delay": 2000, "input_length": 1536, "hash_ids": [1, 2, 3]},
        {"session_id": "b", "delay": 1000, **row, "hash_ids": [1, 4]},
        {"session_id": "a", "delay": 1, **row, "hash_ids": [5]},
    ]
    trace = read_traces([write(tmp_path / "log", lines)])
    assert [request.now for request in trace.requests] == [0, 0.5, 1.5, 2, 2.001]
    assert (trace.delayed, trace.turns_anew, trace.guessed_from) == (4, 1, None)
    assert "computed from delays after the request before: 4" in describe_trace(trace)
    assert "do not begin like the one before: 1" in describe_trace(trace)
    assert read_traces([write(tmp_path / "log", lines)], time_unit="s").requests[-1].now == 2001


def session(*requests, **fields):
    """A session of kv-cache-tester, whose ids have 64 tokens."""
    return {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": [*requests], **fields}


def request_at(t, *ids, **fields):
    return {"t": t, "type": "n", "in": 64 * len(ids), "out": 3, "hash_ids": [*ids], **fields}


SUBAGENT = {"t": 100, "type": "subagent", "requests": [request_at(150, 1, 2, 4)], "status": "completed"}


@pytest.mark.parametrize("indent", [None, 1])
def test_a_session_in_one_object_has_its_requests_and_those_of_subagents(tmp_path, indent):
    one = session(request_at(0, 1, 2), request_at(700_000.5, 1, 2, 3), SUBAGENT)
    trace = read_traces([write(tmp_path / "log", [json.dumps(one, indent=indent)])])
    assert [request.now for request in trace.requests] == [0, 150, 700_000.5]
    assert (trace.block_tokens, trace.is_size_guessed, trace.blocks, trace.different_blocks) == (64, False, 8, 4)
    assert (trace.tokens, trace.guessed_from, trace.out_of_order) == (64 * 8, None, 1)


def test_sessions_with_blocks_of_different_sizes_share_no_cache(tmp_path):
    path = write(tmp_path / "log", [session(request_at(0, 1)), session(request_at(0, 1), block_size=32)])
    with pytest.raises(TraceError, match=r"blocks of \[32, 64\] tokens cannot share a cache"):
        read_traces([path])
    assert read_traces([path], block_tokens=64).block_tokens == 64


@pytest.mark.parametrize(("scope", "blocks"), [("local", 4), ("global", 2)])
def test_ids_of_sessions_are_related_if_their_scope_is_global(tmp_path, scope, blocks):
    lines = [session(request_at(at, 1, 2), hash_id_scope=scope) for at in (0, 1)]
    assert read_traces([write(tmp_path / "log", lines)]).different_blocks == blocks


def test_models_of_a_session_share_nothing_and_a_bad_request_is_only_one(tmp_path):
    one = session(request_at(0, 1, 2, model="x"), request_at(1, 1, 2, model="y"), {"t": 2, "in": 1}, request_at(3, 1))
    path = write(tmp_path / "log", [one])
    with pytest.raises(TraceError, match="line 1: it has neither hash_ids"):
        read_traces([path])
    trace = read_traces([path], skip_bad_lines=True)
    assert (len(trace.requests), len(trace.bad_lines), trace.different_blocks) == (3, 1, 5)


def test_files_of_known_and_unknown_units_are_one_load(tmp_path):
    sessions = write(tmp_path / "a", [session(request_at(at, 1, 2)) for at in (0, 3000)])
    milliseconds = [{"timestamp": at, "input_length": 128, "hash_ids": [1, 2]} for at in (1_000, 2_000_000)]
    trace = read_traces([sessions, write(tmp_path / "b", milliseconds)], block_tokens=64)
    assert [request.now for request in trace.requests] == [0, 1, 2000, 3000]
    assert (trace.time_unit, trace.guessed_from) == ("ms", 1_999_000)
