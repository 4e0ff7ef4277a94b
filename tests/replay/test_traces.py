"""What is a request, what is not, and who shares a prefix with whom."""

import gzip
import json

import pytest

from cpu_prefix_cache.model.hashing import ChainHasher
from cpu_prefix_cache.replay.traces import TraceError, read_traces
from tests.replay.traces import mooncake_lines, write

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
def test_seconds_are_told_from_milliseconds_by_how_long_the_log_would_be(tmp_path, timestamps, unit, seconds):
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


def test_blocks_of_different_sizes_share_no_cache_unless_a_size_is_said(tmp_path):
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
    ({**GOOD, "hash_ids": [7, 7]}, "names a block twice"),
    ({**GOOD, "hash_ids": [7, 9]}, "id 9 follows 7 here and follows 8 before"),
    ({**GOOD, "hash_ids": [8]}, "id 8 begins a prompt here and follows 7 before"),
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


def test_what_a_skipped_line_says_of_its_ids_is_forgotten(tmp_path):
    path = write(tmp_path / "log", [GOOD, {**GOOD, "hash_ids": [5, 7]}, {**GOOD, "hash_ids": [4, 5]}])
    trace = read_traces([path], skip_bad_lines=True)
    assert [len(request.keys) for request in trace.requests] == [3, 2]


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
