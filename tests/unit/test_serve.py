"""Requests, times and figures of `benchmarks/vllm/serve.py`, with a simple engine in place of vLLM."""

import asyncio
import gzip
import importlib
import json
from pathlib import Path

import pytest

from benchmarks.vllm.serve_loop import Loop, Tokens, results
from benchmarks.vllm.serve_trace import Request, dealt, ideal_hit, read, timed

LIMIT = 10_000


def line(at: int, ids: list[int], tokens: int, session: int | None = None, answer: int = 100) -> dict:
    values = {"timestamp": at, "input_length": tokens, "output_length": answer, "hash_ids": ids}
    return values if session is None else values | {"session": session}


@pytest.fixture
def trace(tmp_path):
    def write(*lines: dict, name: str = "trace.jsonl.gz") -> Path:
        path = tmp_path / name
        text = "".join(json.dumps(each) + "\n" for each in lines)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path

    return write


def test_blocks_shrink_and_keep_what_they_share(trace):
    path = trace(line(0, [1, 2, 3], 1200), line(1000, [1, 2, 4], 1536))
    (one, two), left_out = read(path, block_tokens=64, max_answer=48, max_tokens=LIMIT)
    assert (one.tokens, two.tokens, one.answer, left_out) == (150, 192, 48, 0)
    assert one.pieces(64) == [(1, 64), (2, 64), (3, 22)]
    assert two.pieces(64)[:2] == one.pieces(64)[:2]
    assert ideal_hit([one, two], 64) == pytest.approx(1 - 4 * 64 / (150 + 192))


def test_a_request_that_the_engine_would_refuse_is_left_out_and_counted(trace):
    path = trace(line(0, [1], 512), line(1, [2, 3], 1024), name="trace.jsonl")
    requests, left_out = read(path, block_tokens=512, max_answer=10, max_tokens=600)
    assert [request.ids for request in requests] == [(1,)]
    assert left_out == 1


def test_a_prompt_of_no_blocks_is_refused(trace):
    with pytest.raises(ValueError, match="request 0 of the trace has no hash_ids"):
        read(trace(line(0, [], 12)), block_tokens=64, max_answer=1, max_tokens=LIMIT)


def requests_of(*sessions: str) -> list[Request]:
    return [Request(float(at), session, (at,), 64, 4) for at, session in enumerate(sessions)]


def test_a_user_plays_sessions_to_their_end():
    shares = dealt(requests_of(*"aaabbcddd"), users=2, limit=8)
    assert ["".join(request.session for request in share) for share in shares] == ["aaadd", "bbc"]


def test_without_sessions_users_share_the_requests(trace):
    path = trace(*(line(at, [at], 512) for at in range(6)))
    requests, _ = read(path, block_tokens=64, max_answer=1, max_tokens=LIMIT)
    shares = dealt(requests, users=2, limit=100)
    assert [[request.ids[0] for request in share] for share in shares] == [[0, 2, 4], [1, 3, 5]]


def test_times_are_stretched_to_the_rate():
    times = timed(requests_of(*"abcde"), rate=2, limit=5)
    assert [at for at, _ in times] == pytest.approx([0, 0.625, 1.25, 1.875, 2.5])


class Engine:
    """Answers one token in each turn of the event loop, and half of each prompt was cached."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.running = self.most = 0

    async def ask(self, prompt, answer):
        self.log.append(("asked", prompt[0]))
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(answer):
            await asyncio.sleep(0)
            yield Tokens(1, len(prompt) // 2)
        self.running -= 1
        self.log.append(("answered", prompt[0]))


def test_a_user_waits_for_each_answer():
    engine = Engine()
    users = [[([at] * 8, 3) for at in (1, 2, 3)], [([at] * 8, 3) for at in (10, 20)]]
    loop = Loop(engine.ask, print, 5)
    asyncio.run(loop.closed(users))
    for user in users:
        own = [entry for entry in engine.log if entry[1] in {prompt[0] for prompt, _ in user}]
        assert own == [(what, prompt[0]) for prompt, _ in user for what in ("asked", "answered")]
    assert engine.most == 2
    assert [(each["prompt"], each["cached"], len(each["tokens"])) for each in results(loop)] == [(8, 4, 3)] * 5


def test_an_open_loop_does_not_wait():
    engine = Engine()
    loop = Loop(engine.ask, print, 3)
    asyncio.run(loop.open([(0.0, [at], 50) for at in range(3)]))
    assert engine.most == 3
    assert all(each["tokens"][0] >= each["sent"] == 0.0 for each in results(loop))


def test_an_answer_cut_short_is_no_answer():
    async def mute(prompt, answer):
        yield Tokens(answer - 1, 0)

    with pytest.raises(RuntimeError, match="a request has 2 tokens, and was to have 3"):
        asyncio.run(Loop(mute, print, 1).closed([[([1], 3)]]))


@pytest.fixture
def module():
    """A script of benchmarks for vLLM, by its name."""
    return lambda name: importlib.import_module(f"benchmarks.vllm.{name}")


@pytest.fixture
def report(module):
    return module("serve_report")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("our-lazy@40", "there is no engine 'our-lazy': give one of none, null, ours-lazy"),
        ("ours-lazy", "ours-lazy: give GiB of host memory behind the name, such as ours-lazy@40"),
        ("ours-lazy@0", "ours-lazy@0: give GiB"),
        ("none@40", "none has no host memory: give none alone"),
    ],
)
def test_an_engine_that_cannot_start_is_refused_before_any_does(module, cell, message):
    with pytest.raises(ValueError, match=message):
        module("serve").parsed(cell)


def test_engines_are_given_with_their_host_memory(module):
    assert [module("serve").parsed(cell) for cell in ("none", "null@16")] == [("none", 0), ("null", 16)]


def answered(prompt: int, cached: int, sent: float, *tokens: float) -> dict:
    return dict(prompt=prompt, cached=cached, sent=sent, tokens=list(tokens))


def test_figures_of_what_was_answered(report):
    requests = [answered(100, 0, 0.0, 1.0, 1.5, 1.6), answered(300, 200, 1.0, 1.5)]
    answer = dict(answered=requests, seconds=2.0)
    row = report.served_row(answer, gpus=2, price=3.6)
    assert (row["prompt_tokens_per_s"], row["tokens_per_s_per_gpu"], row["hit"]) == (200, 101, 0.5)
    assert row["first_token_ms"] == dict(mean=750.0, p50=1000.0, p95=1000.0, p99=1000.0)
    assert row["between_tokens_ms"] == dict(mean=300.0, p50=500.0, p95=500.0, p99=500.0)
    assert row["cost_per_million_tokens"] == pytest.approx(7.2 / 3600 * 2 / 404 * 1e6, abs=1e-4)
    title, _, line = report.served_table([("ours-lazy@40", row)]).splitlines()
    assert title.count("|") == line.count("|")
    assert line.startswith("| ours-lazy@40 | 200 | 101 | 0.500 | 750, 1,000, 1,000, 1,000 | 300.0, ")
    title, _, line = report.served_table([("none", report.served_row(answer, gpus=2, price=None))]).splitlines()
    assert title.count("|") == line.count("|") == 7


def test_figures_of_a_convoy(report):
    together = [answered(10, cached, 0.0, at) for cached, at in ((9, 0.3), (8, 0.2), (9, 0.4))]
    row = report.convoy_row([answered(10, 9, 5.0, 5.1)], together)
    assert [row[name] for name in ("alone_ms", "first_ms", "median_ms", "last_ms")] == [100.0, 200.0, 300.0, 400.0]
    assert (row["last_over_first"], row["least_cached"], row["prompts"]) == (2.0, 8, 3)
    title, _, line = report.convoy_table([("none", row)]).splitlines()
    assert title.count("|") == line.count("|")
