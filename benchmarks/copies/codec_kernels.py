"""Kernels that code blocks: whether they are right, and how fast, in GB of raw KV a second. GB are 1e9 bytes.

    python -m benchmarks.copies.codec_kernels [--only check rates share link] [--quick]
    TRITON_INTERPRET=1 python -m benchmarks.copies.codec_kernels        on a CPU: check only

check   coded bytes are those of the reference (copier/coded_form.py), every byte; decoded bits are those of before, of
        all bit patterns; units that do not fit are reported; and a damaged byte is seen
rates   encode and decode alone over the number of programs, of one warp each, for fragments of several sizes; and raw
        gather and scatter (copier/triton_staging.py) beside them
share   the same on 8 SMs alone (a green context)
link    through two slots, over the link, coded (by programs) and raw in turn: the rate of KV bytes, and how much longer
        matrix products and a loop of small kernels take beside them; "first" with kernels of the highest priority
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

import torch

from benchmarks.common import print_environment
from cpu_prefix_cache.copier import coded_form
from cpu_prefix_cache.copier.triton_coding import coding_launchers
from cpu_prefix_cache.copier.triton_staging import INTERPRETED, launchers, tiling_for
from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.model.codec import EXPONENT

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
SLOT_BYTES = 31 * MIB
PROGRAMS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
LINKED = (128, 512, 1024)  # programs beside a link
PARTS = 64  # as keys and values of 32 layers
POISON = 0xAB


class Coder:
    """Codes pieces of parts, uint8 [blocks, bytes] on the device, of one length. `device_blocks` blocks make a piece;
    `programs` warps work at a time."""

    def __init__(self, parts: list[torch.Tensor], *, programs: int, device_blocks: int = 1) -> None:
        coded = EXPONENT.kept_bytes(parts[0].shape[1]) * device_blocks
        self.pitch = coded * len(parts)
        offsets = range(0, self.pitch, coded)
        (self._launcher,) = coding_launchers(parts, offsets, device_blocks=device_blocks, programs=programs)

    def encode(self, slot: torch.Tensor, ids: torch.Tensor, flags: torch.Tensor) -> None:
        """Code the pieces of these blocks into `slot`, and set the flags, int32 [pieces], of those that do not fit."""
        self._launcher.launch(Direction.STORE, self.pitch, slot, ids, _stream(), flags)

    def decode(self, slot: torch.Tensor, ids: torch.Tensor) -> None:
        self._launcher.launch(Direction.LOAD, self.pitch, slot, ids, _stream(), slot)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream if DEVICE.type == "cuda" else 0


def patterns(values: int) -> dict[str, torch.Tensor]:
    """Values, bf16 [values], of each kind that a format could stumble over."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(values, generator=generator)
    drawn = torch.randint(-32768, 32768, (values,), generator=generator, dtype=torch.int32)
    few = torch.rand(values, generator=generator) < 0.005
    special = torch.tensor([0x7F80, -0x80, 0x7FC1, -1, 0x7F81, -0x8000, 0, 1, -0x7FFF, 0x7F, 0x80, 0x7F7F])
    mixed = torch.where(few, special[drawn % len(special)].int(), normal.bfloat16().view(torch.int16).int())
    bits = {
        "any bits": drawn,
        "each pattern in turn": torch.arange(values) % 65536 - 32768,
        "specials among normal numbers": mixed,
        "NaN payloads": drawn | 0x7F80,
        "subnormals": drawn & ~0x7F80,
        "exponents that are near": drawn & 0x807F | (60 + drawn % 14) << 7,
    }
    numbers = {
        "normal numbers": normal,
        "negative zeros": torch.full((values,), -0.0),
        "rows of zeros": normal * (torch.arange(values) // 64 % 3 > 0),
        "a channel far above": normal * torch.where(torch.arange(values) % 128 == 5, 4096.0, 1.0),
        "a channel far below": normal * torch.where(torch.arange(values) % 128 == 5, 2.0**-30, 1.0),
        "infinities": torch.where(few, torch.inf, normal),
    }
    of_bits = {name: torch.where(each > 0x7FFF, each - 0x10000, each) for name, each in bits.items()}
    return {name: each.to(torch.int16).view(torch.bfloat16) for name, each in of_bits.items()} | {
        name: each.bfloat16() for name, each in numbers.items()
    }


def check(length: int, programs: int) -> None:
    """Code pieces with two fragments of `length` bytes in each of two parts, one piece for each pattern."""
    kinds = patterns(length * 2)
    blocks = torch.stack(list(kinds.values())).view(torch.uint8).view(len(kinds), 4, length)
    before = [blocks[:, part::2].reshape(-1, length).to(DEVICE) for part in range(2)]  # blocks 2i and 2i + 1 of piece i
    after = [torch.full_like(part, POISON) for part in before]
    ids = torch.arange(2 * len(kinds), device=DEVICE)
    coder = Coder(before, programs=programs, device_blocks=2)
    slot = torch.full((len(kinds) * coder.pitch,), POISON, dtype=torch.uint8, device=DEVICE)
    flags = torch.zeros(len(kinds), dtype=torch.int32, device=DEVICE)
    coder.encode(slot, ids, flags)
    Coder(after, programs=programs, device_blocks=2).decode(slot, ids)

    fragments = torch.stack(before).view(2, len(kinds), 2, length).transpose(0, 1)  # piece, part, which
    expected, fits = coded_form.encode(fragments.reshape(-1, length).cpu())
    assert torch.equal(slot.cpu().view(len(expected), -1), expected), "coded bytes differ"
    assert torch.equal(flags.cpu() == 0, fits.view(len(kinds), 4).all(1)), "the flags differ"
    assert torch.equal(coded_form.decode(expected, length)[fits], fragments.reshape(-1, length).cpu()[fits])
    came_back = torch.stack(after).view(2, len(kinds), 2, length).transpose(0, 1)
    same = (came_back == fragments).flatten(1).all(1).cpu()
    assert bool(same[flags.cpu() == 0].all()), "bits differ"
    refused = [name for name, flag in zip(kinds, flags.tolist(), strict=True) if flag]
    print(
        f"{length:8d} bytes: {len(kinds) - len(refused)} kinds are equal, {', '.join(refused)} do not fit", flush=True
    )

    slot[coder.pitch * list(kinds).index("normal numbers") + 200] ^= 4  # the control
    Coder(after, programs=programs, device_blocks=2).decode(slot, ids)
    assert not torch.equal(
        torch.stack(after).view(2, len(kinds), -1)[:, 6], torch.stack(before).view(2, len(kinds), -1)[:, 6]
    )


class Scene:
    """Parts of `fragment` bytes in each block, random blocks of which fill a slot of `slot_bytes` raw bytes."""

    def __init__(self, fragment: int, slot_bytes: int, escapes: float) -> None:
        self.parts_count = max(1, min(PARTS, slot_bytes // fragment // 4))
        self.count = slot_bytes // (fragment * self.parts_count)
        self.num_bytes = self.count * fragment * self.parts_count
        blocks = max(2 * self.count, 2 * GIB // (fragment * self.parts_count))
        memory = torch.randn(blocks * self.parts_count * fragment // 2, device=DEVICE, dtype=torch.bfloat16)
        memory[torch.rand(len(memory), device=DEVICE) < escapes] *= 2.0**-40
        shaped = memory.view(torch.uint8).view(self.parts_count, blocks, fragment)
        self.parts = list(shaped)
        rng = random.Random(0)
        self.ids = [torch.tensor(rng.sample(range(blocks), self.count), device=DEVICE) for _ in range(8)]
        self.slots = [torch.empty(self.num_bytes + 4096, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        self.flags = torch.zeros(self.count, dtype=torch.int32, device=DEVICE)
        self.coded_bytes = self.count * self.parts_count * EXPONENT.kept_bytes(fragment)

    def coded(self, programs: int) -> dict[str, Callable[[int], None]]:
        coder = Coder(self.parts, programs=programs)
        return {
            "encode": lambda turn: coder.encode(self.slots[turn % 2], self.ids[turn % 8], self.flags),
            "decode": lambda turn: coder.decode(self.slots[turn % 2], self.ids[turn % 8]),
        }

    def raw(self) -> dict[str, Callable[[int], None]]:
        fragment = self.parts[0].shape[1]
        offsets = [part * fragment for part in range(self.parts_count)]
        made = launchers(self.parts, offsets, device_blocks=1, tiling=tiling_for(32))

        def run(direction: Direction, turn: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for each in made:
                pitch = fragment * self.parts_count
                each.launch(direction, pitch, self.slots[turn % 2], self.ids[turn % 8], stream)

        return {
            "encode": lambda turn: run(Direction.STORE, turn),
            "decode": lambda turn: run(Direction.LOAD, turn),
        }


def seconds(call: Callable[[int], None], times: int = 20, repeats: int = 5) -> float:
    """The median time of one call among `times` without a pause."""
    found = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for turn in range(times):
            call(turn)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / times)
    return median(found[1:])


def rates(quick: bool) -> None:
    cases = [(16 * KIB, 0.0005), (16 * KIB, 0.0), (16 * KIB, 0.01), (1 * MIB, 0.0005), (4 * KIB, 0.0005)]
    print(f"GB/s of raw KV, encode / decode, by programs: {', '.join(map(str, PROGRAMS))}; then raw with 64 of 8 warps")
    for fragment, escapes in cases[: 2 if quick else None]:
        scene = Scene(fragment, 256 * MIB, escapes)
        for name in ("encode", "decode"):
            for turn in range(2):  # what decode reads
                scene.coded(1024)["encode"](turn)
            found = [scene.num_bytes / seconds(scene.coded(programs)[name]) / 1e9 for programs in PROGRAMS]
            assert not int(scene.flags.sum()), "a piece does not fit"
            raw = scene.num_bytes / seconds(scene.raw()[name]) / 1e9
            numbers = " ".join(f"{rate:6.0f}" for rate in found)
            print(
                f"{fragment // KIB:5d} KiB, {100 * escapes:.2f} % small, {name}: {numbers}   raw {raw:6.0f}", flush=True
            )


@contextmanager
def on_few(sms: int) -> Iterator[bool]:
    """Enter a context of so many SMs, if torch can."""
    try:
        from torch.cuda.green_contexts import GreenContext

        context = GreenContext.create(num_sms=sms, device_id=0)
        context.set_context()
    except (ImportError, RuntimeError, TypeError) as error:
        print(f"no context of {sms} SMs: {error}")
        yield False
        return
    try:
        yield True
    finally:
        torch.cuda.synchronize()
        context.pop_context()


def share() -> None:
    """Measure what 8 SMs reach alone."""
    scene = Scene(16 * KIB, 256 * MIB, 0.0005)
    with on_few(8) as there:
        for programs in (64, 128, 256) if there else ():
            each = scene.coded(programs)
            found = [scene.num_bytes / seconds(each[name], times=5) / 1e9 for name in ("encode", "decode")]
            print(f"8 SMs, {programs} programs: encode {found[0]:.0f}, decode {found[1]:.0f} GB/s", flush=True)


class Pipe:
    """A load or store without end: two slots, a stream of kernels and one of copies, as in copier/ring.py."""

    def __init__(self, kernel: Callable[[int], None], scene: Scene, num_bytes: int, loads: bool, first: bool) -> None:
        self._kernel = kernel
        self._scene = scene
        self._bytes = num_bytes
        self._loads = loads
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        usual, highest = torch.cuda.Stream.priority_range()
        self._kernels, self._copies = torch.cuda.Stream(priority=highest if first else usual), torch.cuda.Stream()
        self._free = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def slice(self) -> None:
        first, second = (self._copies, self._kernels) if self._loads else (self._kernels, self._copies)
        turn, self._turn = self._turn, self._turn + 1
        free = self._free[turn % 2]
        free.synchronize()
        for stream in (first, second):
            with torch.cuda.stream(stream):
                if stream is self._kernels:
                    self._kernel(turn)
                else:
                    self._cross(turn)
            if stream is first:
                second.wait_stream(first)
        free.record(second)

    def _cross(self, turn: int) -> None:
        slot = self._scene.slots[turn % 2][: self._bytes]
        if self._loads:
            slot.copy_(self._host, non_blocking=True)
        else:
            self._host.copy_(slot, non_blocking=True)


def work(name: str) -> Callable[[], None]:
    """Work of an engine, of about 5 ms: matrix products, or many small kernels that read HBM."""
    if name == "products":
        a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
        return lambda: [torch.mm(a, a) for _ in range(4)] and None
    weights = [torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(32)]
    x = torch.randn(8, 4096, device=DEVICE, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    for _ in range(2):
        y = x @ weights[0]
    with torch.cuda.graph(graph):
        y = x
        for _ in range(8):
            for weight in weights:
                y = torch.nn.functional.layer_norm(y @ weight, (4096,))
    return graph.replay


class Paced:
    """Runs of some work in a stream of its own, four of them submitted ahead."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run, self._stream = run, torch.cuda.Stream(priority=0)
        self._events: list[torch.cuda.Event] = []

    def top_up(self) -> None:
        while len(self._events) < 5 or self._events[-4].query():
            with torch.cuda.stream(self._stream):
                self._run()
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record(self._stream)

    def pace(self) -> float:
        """The median time of a run."""
        torch.cuda.synchronize()
        kept = self._events[4:-4]
        return median(before.elapsed_time(after) for before, after in pairwise(kept)) / 1e3


def beside(pipe: Pipe | None, run: Callable[[], None] | None, wanted: float) -> tuple[float, float]:
    """Count, for `wanted` seconds: slices a second, and the seconds of one run."""
    paced = Paced(run) if run else None
    torch.cuda.synchronize()
    start, slices = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < wanted:
        if pipe:
            pipe.slice()
            slices += 1
        if paced:
            paced.top_up()
    return slices / spent, paced.pace() if paced else 0.0


def link(quick: bool) -> None:
    scene = Scene(16 * KIB, SLOT_BYTES, 0.0005)
    for turn in range(2):  # what decode reads
        scene.coded(1024)["encode"](turn)
    wanted = 0.2 if quick else 0.6
    for works in ("nothing", "products", "small kernels"):
        run = None if works == "nothing" else work(works)
        for loads in (True, False):
            _link_row(scene, works, run, loads, wanted)


def _link_row(scene: Scene, works: str, run: Callable[[], None] | None, loads: bool, wanted: float) -> None:
    """Print one direction beside one work, each way in turn, three times."""
    kernel = "decode" if loads else "encode"
    coded = {count: (scene.coded(count)[kernel], scene, scene.coded_bytes, loads) for count in LINKED}
    raw = (scene.raw()[kernel], scene, scene.num_bytes, loads)
    ways = {f"coded, {count}": Pipe(*each, first=False) for count, each in coded.items()}
    ways |= {f"coded, {LINKED[-1]}, first": Pipe(*coded[LINKED[-1]], first=True)}
    ways |= {"raw": Pipe(*raw, first=False), "raw, first": Pipe(*raw, first=True)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    alone = []
    for _ in range(3):
        alone.append(beside(None, run, wanted)[1] if run else 1.0)
        for name, pipe in ways.items():
            found[name].append(beside(pipe, run, wanted))
    for name, each in found.items():
        rate = median(slices for slices, _ in each) * scene.num_bytes / 1e9
        crossing = rate * (1 if name.startswith("raw") else scene.coded_bytes / scene.num_bytes)
        slow = f"; {works} take {median(pace for _, pace in each) / median(alone):.3f} times as long" if run else ""
        name = f"{'load' if loads else 'store'}, {name}"
        print(f"{name}: {rate:.1f} GB/s of KV, {crossing:.1f} on the link{slow}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=["check", "rates", "share", "link"])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    print_environment(["torch", "triton"])
    chosen = options.only or (["check"] if DEVICE.type == "cpu" else ["check", "rates", "share", "link"])
    if DEVICE.type == "cuda":
        print(torch.cuda.get_device_name())
    if "check" in chosen:
        for length in (1024, 3072, 17408, *(() if DEVICE.type == "cpu" else (6 * KIB, 18 * KIB, MIB))):
            check(length, 2 if DEVICE.type == "cpu" else 300)
    if "rates" in chosen:
        rates(options.quick)
    if "share" in chosen:
        share()
    if "link" in chosen:
        link(options.quick)


if __name__ == "__main__":
    main()
