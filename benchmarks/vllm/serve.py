"""Serves a trace with real vLLM engines in turn, each alone on its GPUs, and prints a table of them.

    python -m benchmarks.vllm.serve TRACE --engines "null@40,ours-lazy@40,offloading@40,none" --json serve.json
    python -m benchmarks.vllm.serve TRACE --engines "ours-lazy@40" --rate 8     open loop: requests at the trace's times
    python -m benchmarks.vllm.serve TRACE --servers 2 --engines "pool@40,ours-lazy@20"      several servers of one model
    python -m benchmarks.vllm.serve --convoy 50 --engines "ours-lazy@40,offloading@40"

An engine is `none`, or a name and GiB of host memory: those of `vllm_reload.py`, and ours-adaptive, ours-arc (lazy),
ours-eager-adaptive, offloading-arc. Weights are random, and only times are measured. With several `--servers` each has
so many GiB, and each request goes to a random one; `pool@GIB` is a keeper's pool, which has so many for all servers.

Users play sessions of the trace, which has Mooncake's format: each sends a request when the one before is answered, and
takes the next session when one ends. Which requests are sent is the same for every engine. `--rate` sends them at the
trace's times, stretched to so many a second, whatever has been answered.

Tokens are made before the clock starts. It runs until the last token of the last answer. A time between tokens counts
for each token of an answer but the first; time to the first token counts from when a request should have been sent.

`serve_plot.py` draws what was written over host memory or users.

`--steps FOLDER` notes each step of each engine there, for `step_report.py`: one server with a connector, on one GPU.

A convoy is that many prompts at once on one prefix of 32,768 tokens, which the device has evicted.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import environment, keeper, print_environment
from benchmarks.vllm import serve_trace
from benchmarks.vllm.serve_report import convoy_row, convoy_table, served_row, served_table
from benchmarks.vllm.shapes import SHAPES
from benchmarks.vllm.vllm_reload import (
    ENGINES,
    GIB,
    MAX_MODEL_LEN,
    PIN_SECONDS_PER_GIB,
    POOL,
    SWEEP,
    Engine,
    end_engines_when_terminated,
    model_folder,
    say,
)

PACKAGES = ["vllm", "torch", "triton"]
BLOCK_TOKENS = 16  # of the device
CONVOY_TOKENS, CONVOY_TAIL = 32_768, 64
WARM_UP = [4_096, 512, 64]  # tokens of prompts before the clock starts


def parsed(cell: str) -> tuple[str, int]:
    """The name of an engine and its GiB of host memory. Raises ValueError for others than those that can start."""
    name, _, gib = cell.partition("@")
    if name not in ENGINES:
        raise ValueError(f"there is no engine {name!r}: give one of {', '.join(ENGINES)}")
    if ENGINES[name] is None:
        if gib:
            raise ValueError(f"{name} has no host memory: give {name} alone")
        return name, 0
    if not gib.isdecimal() or not int(gib):
        raise ValueError(f"{cell}: give GiB of host memory behind the name, such as {name}@40")
    return name, int(gib)


@contextmanager
def engine(cell: str, model: Path, args: argparse.Namespace) -> Iterator[tuple[Engine, dict[str, Any]]]:
    """The engine of `NAME@GIB`, warm, with its host memory pinned; and its own figures of the start."""
    name, host_gib = parsed(cell)
    settings = argparse.Namespace(**{**vars(args), "host_gib": host_gib, "log_stats": False})
    with ExitStack() as stack:
        options: dict[str, Any] = {}
        if name == POOL:
            path = stack.enter_context(tempfile.TemporaryDirectory()) + "/kv.sock"
            stack.enter_context(keeper(path, host_gib * GIB))
            options["pool"] = {"address": f"unix:{path}", "model": "random", "revision": "1"}
        if args.steps:
            args.steps.mkdir(exist_ok=True)
            os.environ["STEPS"] = str(args.steps / f"{cell}.jsonl")  # for step_trace.py
        running = Engine(name, model, settings, "serve_engine", str(args.servers), noted=bool(args.steps), **options)
        stack.callback(running.close)
        start = running.receive()
        say(f"{cell}: started in {start['start']:.0f} s on {start['device']}")
        warm_up = WARM_UP if args.servers == 1 else WARM_UP * 4 * args.servers
        serve(running, [[request] for request in [([*running.new(length)], 8) for length in warm_up]])
        time.sleep(PIN_SECONDS_PER_GIB * host_gib * args.servers)
        yield running, start


def serve(running: Engine, users: Sequence[Sequence[tuple[Any, int]]]) -> dict[str, Any]:
    return running.send({"users": users})


def job(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The requests for an engine, and a description of them."""
    requests, left_out = serve_trace.read(args.trace, args.block_tokens, args.max_answer, MAX_MODEL_LEN)

    def asked(request: serve_trace.Request) -> tuple[Any, int]:
        return request.pieces(args.block_tokens), request.answer

    if args.rate is None:
        shares = serve_trace.dealt(requests, args.users, args.requests)
        chosen = [request for share in shares for request in share]
        send: dict[str, Any] = {"users": [[asked(request) for request in share] for share in shares]}
        users: int | None = len(shares)
        load = f"{users} users in a closed loop"
    else:
        times = serve_trace.timed(requests, args.rate, args.requests)
        chosen = [request for _, request in times]
        send = {"requests": [(at, *asked(request)) for at, request in times]}
        users = None
        load = f"an open loop of {args.rate} requests a second"
    return send, {
        "trace": args.trace.name,
        "load": load,
        "users": users,
        "requests": len(chosen),
        "prompt_tokens": sum(request.tokens for request in chosen),
        "answer_tokens": sum(request.answer for request in chosen),
        "ideal_hit": round(serve_trace.ideal_hit(chosen, args.block_tokens), 3),
        "left_out_too_long": left_out,
    }


def convoy(running: Engine, prompts: int, device_tokens: int) -> dict[str, Any]:
    """Send a prefix, evict it, send one prompt on it and then, evicted again, `prompts` at once."""
    prefix = running.new(CONVOY_TOKENS)
    serve(running, [[(prefix, 1)]])
    answers = {}
    for count in (1, prompts):
        sweeps = device_tokens // SWEEP + 1
        serve(running, [[(running.new(SWEEP), 1) for _ in range(sweeps)]])
        time.sleep(1)
        answers[count] = serve(running, [[(prefix + running.new(CONVOY_TAIL), 1)] for _ in range(count)])["answered"]
    return {"alone": answers[1], "together": answers[prompts]}


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is kept, written after each engine, so that an interrupted run is not lost."""
    kept: dict[str, Any] = {"command": args.command, "environment": environment(PACKAGES), "cells": []}
    send: dict[str, Any] = {}
    if args.trace:
        send, kept["load"] = job(args)
        say(json.dumps(kept["load"]))
    with model_folder(args.model, args.shape, drafts=args.drafter) as model:
        for cell in args.engines.split(","):
            with engine(cell, model, args) as (running, start):
                result: dict[str, Any] = {
                    "engine": cell,
                    "device": start["device"],
                    "start_s": round(start["start"], 1),
                }
                if args.trace:
                    answer = running.send(send)
                    result["served"] = served_row(answer, start["gpus"], args.price)
                    result["requests"] = brief(answer["answered"])
                if args.convoy:
                    answers = convoy(running, args.convoy, args.device_blocks * BLOCK_TOKENS)
                    result["convoy"] = convoy_row(**answers)
            kept["cells"].append(result)
            say(f"{cell}: {json.dumps({key: result[key] for key in ('served', 'convoy') if key in result})}")
            if args.json:
                args.json.write_text(written(kept))
    return kept


def brief(answered: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Figures of each request: the prompt's tokens, those cached, the answer's; ms at which it was sent, and of first
    and last token."""
    return [
        [each["prompt"], each["cached"], len(each["tokens"])]
        + [round(1e3 * seconds) for seconds in (each["sent"], each["tokens"][0], each["tokens"][-1])]
        for each in answered
    ]


def written(kept: dict[str, Any]) -> str:
    """JSON with a line for each cell."""
    head = {key: value for key, value in kept.items() if key != "cells"}
    cells = ",\n".join(json.dumps(cell) for cell in kept["cells"])
    return json.dumps(head, indent=1)[:-2] + f',\n "cells": [\n{cells}\n]}}\n'


def main() -> None:
    end_engines_when_terminated()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--engines", default="null@40,ours-lazy@40,offloading@40,simple-lazy@40,none")
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--servers", type=int, default=1, help="on the GPUs in turn")
    parser.add_argument("--rate", type=float, help="requests a second in an open loop, in place of users")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--block-tokens", type=int, default=64, help="tokens that a block of the trace becomes")
    parser.add_argument("--max-answer", type=int, default=48)
    parser.add_argument("--convoy", type=int, help="prompts at once")
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--drafter", action="store_true", help="EAGLE of one layer, random weights: few drafts hold")
    parser.add_argument("--device-blocks", type=int, default=8_192, help=f"blocks of {BLOCK_TOKENS} tokens")
    parser.add_argument("--price", type=float, help="price of a GPU, an hour: adds the cost of a million tokens")
    parser.add_argument("--model", type=Path, help="a folder for the model's configuration: what vLLM compiles is kept")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=Path, help="a folder")
    args = parser.parse_args()
    if args.steps and args.servers > 1:
        parser.error("--steps notes those of one server")
    if args.trace is None and not args.convoy:
        parser.error("give a trace, or --convoy")
    try:
        for cell in args.engines.split(","):
            parsed(cell)
    except ValueError as error:
        parser.error(str(error))
    args.command = " ".join(["benchmarks/vllm/serve.py", *sys.argv[1:]])
    print_environment(PACKAGES)
    kept = measured(args)
    for key, table in (("served", served_table), ("convoy", convoy_table)):
        rows = [(cell["engine"], cell[key]) for cell in kept["cells"] if key in cell]
        if rows:
            say(table(rows))


if __name__ == "__main__":
    main()
