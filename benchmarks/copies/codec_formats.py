"""Table of forms of a coded block: how small they make KV, and how many values they do not reach (escapes).

    python -m benchmarks.copies.codec_formats [--seconds S] [--only WORDS] [--save FILE] [--samples FILE]

A value is its sign and mantissa, and a code of 3 or 4 bits: the distance of its exponent from a *base*, the largest
exponent of a row of 64 values, of a group of 256, of a channel of the piece, or of the piece. One code is for escapes,
whose exponents stand in a reserve; of 4 bits another one is for the exponent 0. A piece is 16, 64 or 256 tokens of one
layer's keys or values; a state counts as a token. For each form: escapes in all pieces, in the worst, and in the worst
first piece of a prompt; bits of a value without reserve; and how many tokens fit a GiB, raw is 1, with a reserve as
large as the worst piece needs ("least") and with twice this. Then the same values as fp16, whose exponents have 5 bits;
and the form that was chosen (copier/coded_form.py), as it is, bits compared after a round trip.

Samples are from models as in codec_models.py; tiny ones are trained for S seconds each (four times as long for Llama;
0: none). `--save` keeps them for `--samples`. `--only` takes the sources whose names have one of these words.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import print_environment
from benchmarks.copies.codec_models import Samples, artificial, llama, mamba, mla, random_llama, smollm2
from cpu_prefix_cache.copier import coded_form

CODED_KIB = (2, 4, 16)  # of a fragment, before it is coded, for the chosen form


class Form(NamedTuple):
    bits: int  # of a code
    base: str
    tokens: int  # of a piece


FORMS = [
    *(Form(4, base, 16) for base in ("row", "group", "piece")),
    Form(4, "channel", 64),
    *(Form(3, base, 16) for base in ("row", "group")),
    *(Form(3, "channel", tokens) for tokens in (16, 64, 256)),
]


FP16 = Form(3, "row", 16)


class Measured(NamedTuple):
    mean: float  # share of the values that are escapes
    worst: float  # in a piece
    first: float  # in the worst of the first pieces of a prompt
    bits: float  # of a value without its reserve


def exponents(sample: torch.Tensor) -> torch.Tensor:
    """Exponents of bf16 or fp16."""
    shift, bits = (7, 8) if sample.dtype == torch.bfloat16 else (10, 5)
    return sample.view(torch.int16).int() >> shift & (1 << bits) - 1


def measure(sample: torch.Tensor, form: Form) -> Measured:
    """Escapes of a sample, [layers, tokens, values], in one form."""
    tokens = min(form.tokens, sample.shape[1])
    whole = sample.shape[1] // tokens * tokens
    pieces = exponents(sample[:, :whole]).unflatten(1, (-1, tokens))  # layers, pieces, tokens, values
    distance, bases = _distances(pieces, form.base)
    reach = 2**form.bits - 2  # of codes, from 0 on
    escapes = (distance > reach - 1) & (pieces > 0) if form.bits == 4 else distance > reach
    share = escapes.float().mean((2, 3))
    values = tokens * sample.shape[2]
    rest = 8 if sample.dtype == torch.bfloat16 else 11
    bits = rest + form.bits + 8 * bases / values
    return Measured(float(share.mean()), float(share.max()), float(share[:, 0].max()), bits)


def _distances(pieces: torch.Tensor, base: str) -> tuple[torch.Tensor, int]:
    """Distances of all exponents from their bases, and how many bases a piece has."""
    if base in ("row", "group"):
        width = min(64 if base == "row" else 256, pieces[0, 0].numel())
        rows = pieces.flatten(2).unfold(2, width, width)
        distance = torch.zeros_like(pieces.flatten(2))
        distance[..., : rows.shape[2] * width] = (rows.amax(3, keepdim=True) - rows).flatten(2)
        return distance.view_as(pieces), rows.shape[2]
    of = pieces.amax(2, keepdim=True) if base == "channel" else pieces.amax((2, 3), keepdim=True)
    return of - pieces, of[0, 0].numel()


def line(form: Form, found: Measured, kind: str = "") -> str:
    times = [16 / (found.bits + 8 * found.worst * share) for share in (1, 2)]
    mean, worst, first = (100 * each for each in found[:3])
    return (
        f"  {kind}{form.bits} bits, {form.base:8s}{form.tokens:4d} tokens   {mean:7.3f} %{worst:8.3f} %"
        f"{first:8.3f} %   {found.bits:6.3f}   {times[0]:.3f}   {times[1]:.3f}"
    )


def chosen(sample: torch.Tensor, kib: int) -> str:
    """Result of the chosen form on fragments of `kib` KiB, a unit or less."""
    values = sample.flatten().view(torch.uint8)
    size = min(kib << 10, values.numel() // 512 * 512)
    fragments = values[: values.numel() // size * size].view(-1, size)
    coded, fits = coded_form.encode(fragments)
    same = torch.equal(coded_form.decode(coded, size)[fits], fragments[fits])
    room = size // coded_form.GROUP_BYTES * coded_form.RESERVE
    end = size // coded_form.GROUP_BYTES * coded_form.CODED_GROUP
    taken = (coded[:, end - room : end] > 0).sum(1)  # no escape has the exponent 0
    return (
        f"  chosen, {len(fits)} of {kib} KiB: {size / coded.shape[1]:.3f} times; {int((~fits).sum())} do not fit, the "
        f"reserve is {100 * float(taken.max()) / room:.0f} % full at most; bits {'equal' if same else 'DIFFERENT'}"
    )


def report(name: str, sample: torch.Tensor) -> None:
    print(f"\n{name}: {' x '.join(map(str, sample.shape))}")
    print(f"{'':35s}escapes    worst    first    bits    least   twice")
    for form in FORMS:
        print(line(form, measure(sample, form)))
    print(line(FP16, measure(sample.half(), FP16), "fp16, "))
    for kib in CODED_KIB:
        print(chosen(sample, kib), flush=True)


def sources(seconds: float) -> dict[str, Callable[[], Samples]]:
    found: dict[str, Callable[[], Samples]] = {"smollm2": smollm2, "random": random_llama, "artificial": artificial}
    if seconds:
        found |= dict(llama=partial(llama, 4 * seconds), mla=partial(mla, seconds), mamba=partial(mamba, seconds))
    return found


def samples(options: argparse.Namespace) -> Iterator[tuple[str, torch.Tensor]]:
    if options.samples:
        yield from torch.load(options.samples).items()
        return
    for name, source in sources(options.seconds).items():
        if options.only and not any(word in name for word in options.only):
            continue
        try:
            yield from source().items()
        except (ImportError, AttributeError, ValueError) as error:
            print(f"\n{name}: left out, {type(error).__name__}: {error}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30, help="how long tiny models are trained")
    parser.add_argument("--only", nargs="*", help="words of the sources to take")
    parser.add_argument("--samples", type=Path, help="samples that were saved, in place of models")
    parser.add_argument("--save", type=Path, help="where to keep the samples")
    parser.add_argument("--threads", type=int, help="threads of torch")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    print_environment(["torch", "transformers"])
    kept = {}
    for name, sample in samples(options):
        kept[name] = sample
        report(name, sample)
    if options.save:
        torch.save(kept, options.save)


if __name__ == "__main__":
    main()
