"""Questions about documents, answered by `model.generate` with a HostPrefixCache and without: `make demo`.

The device's blocks hold two documents of six. Each round asks two questions about every document: the first finds it on
the host, the second on the device. All answers are compared with those of plain `generate`: tokens, and first logits.
Exit status: 0 all agree (in half precision some may not), 1 they do not, as with --corrupt; 2 a sentence gives why not.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, PreTrainedModel, logging

from builtin_models import ARCHITECTURES, build_model
from connector.transformers import HostPrefixCache
from cpu_prefix_cache import OFFLOAD_MODES, PrefixCacheError
from cpu_prefix_cache.testing import CorruptingCopier
from cpu_prefix_cache.tier import parse_tier

LEAST, MOST = 1_500, 3_600  # tokens of a document
DEVICE_BYTES = {"full": "34MB", "swa": "15MB", "hybrid": "10MB", "mla": "11MB"}  # of two documents
QUESTIONS = ["what is this about?", "which exceptions are raised?", "name one example.", "what comes first?"]
TOLERANCE = 1e-4  # of the logits' deviation. Right runs in float32 differ by 1e-6, with a zeroed block by 1e-2 and more
COLUMNS = ("round", "prompt tokens", "computed", "on device", "on host", "first token", "without", "logit error")


class First(LogitsProcessor):
    """Logits of the first token of an answer, and after how many seconds they were there."""

    def __init__(self) -> None:
        self.began, self.seconds, self.logits = time.perf_counter(), 0.0, torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.seconds:
            self.logits, self.seconds = scores[0].float().cpu().clone(), time.perf_counter() - self.began
        return scores


class Answer(NamedTuple):
    tokens: int  # of the prompt; so many of them were found
    on_device: int
    on_host: int
    seconds: float  # to the first token
    plain_seconds: float
    error: float
    agrees: bool
    new_tokens: torch.Tensor


def load(options: argparse.Namespace) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer; None: each byte is a token."""
    if (path := options.model) is None:
        return build_model(options.arch).to(options.device), None
    folder, more = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **more).to(options.device)
    return model, AutoTokenizer.from_pretrained(folder, **more)


def ask(cache: HostPrefixCache, tokens: list[int], max_new_tokens: int) -> Answer:
    """Answer a prompt with the cache and without."""
    prompt = torch.tensor([tokens], device=cache.model.device)
    options = dict(do_sample=False, max_new_tokens=max_new_tokens, attention_mask=torch.ones_like(prompt))
    ours = First()
    with cache.past(prompt) as past:
        answer = cache.model.generate(prompt, past_key_values=past, logits_processor=[ours], **options)
    plain = First()
    is_same = answer.equal(cache.model.generate(prompt, logits_processor=[plain], **options))
    error = float((ours.logits - plain.logits).abs().max() / plain.logits.std())
    found = len(tokens), past.device_hit_tokens, past.hit_tokens - past.device_hit_tokens
    return Answer(*found, ours.seconds, plain.seconds, error, is_same and error <= TOLERANCE, answer[0, len(tokens) :])


def line(number: int, answers: Sequence[Answer]) -> str:
    tokens, device, host, seconds, plain, errors = list(zip(*answers, strict=True))[:6]
    sums = sum(tokens), sum(tokens) - sum(device) - sum(host), sum(device), sum(host)
    times = (f"{1e3 * median(each):.1f} ms" for each in (seconds, plain))
    cells = zip((number, *sums, *times, f"{max(errors):.1e}"), COLUMNS, strict=True)
    return "  ".join(f"{cell:>{max(9, len(name))}}" for cell, name in cells)


def picture(answers: Sequence[Answer]) -> str:
    """Medians of the time to the first token: without a cache, and where most of the prompt was found."""
    on_host = [each.seconds for each in answers if 2 * each.on_host >= each.tokens]
    on_device = [each.seconds for each in answers if 2 * each.on_device >= each.tokens]
    times = {"no cache": [each.plain_seconds for each in answers], "host hit": on_host, "device hit": on_device}
    ms = {name: 1e3 * median(seconds) for name, seconds in times.items() if seconds}
    bars = (f"{name:12}{ms[name]:7.1f} ms  {'#' * round(1 + 60 * ms[name] / max(ms.values()))}\n" for name in ms)
    return "time to the first token, medians of all rounds\n" + "".join(bars)


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # with two, another busy process makes a small model 50 times slower
    logging.set_verbosity_error()  # on a CPU linear attention has no faster kernels than those it would warn of
    model, tokenizer = load(options)
    encode = tokenizer.encode if tokenizer else lambda text: list(text.encode())
    found = {name: tokens[:MOST] for name in sorted(topics) if len(tokens := encode(topics[name])) >= LEAST}
    texts, answers = dict(list(found.items())[: options.documents]), []
    if min(options.documents, options.rounds, options.max_new_tokens, len(texts)) < 1:
        raise PrefixCacheError("nothing to ask: give --documents, --rounds and --max-new-tokens of 1 or more")
    group = {"chunk": 0, "checkpoint": -1}.get(options.corrupt)
    with HostPrefixCache(
        model,
        host_bytes=options.host_bytes,
        device_bytes=options.device_bytes or (None if options.model else DEVICE_BYTES[options.arch]),
        offload=options.offload,
        below=options.tier and parse_tier(options.tier),
        codec=options.codec,
        wrap_copier=None if group is None else lambda copier, of: CorruptingCopier(copier, of, range(len(of))[group]),
    ) as cache:
        print(f"{options.model or options.arch}, {model.dtype} on {model.device}; help topics {', '.join(texts)}\n")
        print("  ".join(f"{name:>9}" for name in COLUMNS))
        for number in range(options.rounds):
            for (name, text), at in ((each, 2 * number + at) for each in texts.items() for at in (0, 1)):
                question = QUESTIONS[at % len(QUESTIONS)]
                answers.append(ask(cache, text + encode(f"\n\nQuestion: {question} Answer:"), options.max_new_tokens))
                if tokenizer:
                    new, seconds, plain = tokenizer.decode(answers[-1].new_tokens), *answers[-1][3:5]
                    print(f"{seconds:6.2f} s, without {plain:6.2f} s; {name}: {question} {new!r}", flush=True)
            print(line(number + 1, answers[-2 * len(texts) :]), flush=True)
    differing = sum(not each.agrees for each in answers)
    print(f"\n{differing or 'none'} of {len(answers)} answers differ from those without a cache\n\n{picture(answers)}")
    return int(differing > 0 and model.dtype == torch.float32)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=tuple(ARCHITECTURES), default="full", help="a built-in model, random weights")
    parser.add_argument("--model", type=Path, help="a checkpoint in a folder, or a .gguf file; its answers are printed")
    parser.add_argument("--device-bytes", metavar="SIZE", help="memory of the device's blocks; default: two documents'")
    parser.add_argument("--offload", choices=OFFLOAD_MODES, default="lazy")
    parser.add_argument("--tier", help="below host memory: file:/nvme/kv:64GiB, or redis://HOST")
    parser.add_argument("--corrupt", choices=("chunk", "checkpoint"), help="damage the first that is loaded")
    parser.add_argument("--codec", default="none", help="form of bf16 blocks on the host: exponent")
    for name, default in dict(device="cpu", host_bytes="2GiB", documents=6, rounds=2, max_new_tokens=12).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    try:
        return run(parser.parse_args(argv))
    except (PrefixCacheError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
