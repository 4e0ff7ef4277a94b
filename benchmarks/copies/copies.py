"""How close do copies come to the rate of the link, and how much do they slow the engine down?

    python -m benchmarks.copies.copies [--csv FILE] [--only SECTIONS] [--quick]

Compares, on one CUDA or HIP device in one run, a large pinned copy, our staged copier, and three other methods to copy
blocks (`copy_methods.py`). The contract tests of copiers run first, and a round trip of bytes through the region, then
the measurements of the table in docs/copy_paths.md. Each has a bar, a value that one H200 reaches; the exit status is 1
if one was missed. A section that fails is shown and counts as missed, and the others go on. GB is 1e9 bytes; times are
medians. (The script is not named copy.py, because that would hide Python's module from the scripts in this folder.)
"""

import argparse
import csv
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
import triton

from benchmarks.common import percentile, print_environment
from benchmarks.copies.copy_methods import DEVICE, METHODS, Large, Method, Scene, Staged
from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import Direction, TransferPlan
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.driver import accelerator_driver
from cpu_prefix_cache.messages.plan import StepPlan
from cpu_prefix_cache.tools.bench.measure import name_of

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
FRAGMENTS = (4, 8, 16, 18, 32, 64)  # KiB
STORE, LOAD = Direction.STORE, Direction.LOAD
POISON = 0xAB
TORCH_FRAGMENTS = 8192  # the most of one transfer with torch, whose loop takes 5 us for each
RESULTS: list[tuple[bool | None, str]] = []  # whether the bar was reached (None: no bar), and the line


def line(text: str, kept: bool | None = None) -> None:
    mark = {None: "     ", True: " ok  ", False: "MISS "}[kept]
    RESULTS.append((kept, text))
    print(mark + text, flush=True)


def poll(event: Event) -> None:
    """Wait without sleeping, as an engine does: after a sleep of 20 ms the first calls take ten times as long."""
    while not event.passed():
        pass


def measured(method: Method, direction: Direction, repeats: int) -> tuple[float, float]:
    """The median time from submission to the end, and the CPU time of the fastest submission, both in seconds.

    The fastest, because in slower ones other processes had disturbed this one.
    """
    times, submits = [], []
    for repeat in range(repeats + 1):
        torch.cuda.synchronize()
        start, worked = time.perf_counter(), time.thread_time()
        event = method.submit(direction)
        worked = time.thread_time() - worked
        poll(event)
        if repeat:
            times.append(time.perf_counter() - start)
            submits.append(worked)
    return median(times), min(submits)


def sustained(method: Method, directions: Sequence[Direction], seconds: float = 0.15) -> float:
    """GB/s of back-to-back transfers, summed over the directions, for about `seconds` seconds."""
    count = max(1, round(seconds * 55e9 / method.num_bytes))
    torch.cuda.synchronize()
    ends: list[float] = []
    gate = threading.Barrier(len(directions) + 1)

    def one_way(direction: Direction) -> None:
        torch.cuda.set_device(DEVICE)
        gate.wait()
        events = [method.submit(direction) for _ in range(count)]
        events[-1].until_passed()
        ends.append(time.perf_counter())

    threads = [threading.Thread(target=one_way, args=(direction,)) for direction in directions]
    for thread in threads:
        thread.start()
    start = time.perf_counter()
    gate.wait()
    for thread in threads:
        thread.join()
    return len(directions) * count * method.num_bytes / (max(ends) - start) / 1e9


# Copiers that run here


def peers(arena: HostArena, pinned: torch.Tensor) -> dict[str, Callable[[Scene], Method]]:
    """Ours, and of the others those that this device and its driver carry out."""
    scene, runs = Scene(arena, pinned, 64 * KIB, 4, MIB, "random"), dict(METHODS)
    for name, build in METHODS.items():
        try:
            for direction in Direction:
                build(scene).submit(direction).until_passed()
        except Exception as error:
            line(f"not run: {name} ({type(error).__name__}: {error})", False if name == "staged" else None)
            del runs[name]
    return runs


def beside_each_other(scene: Scene, options: argparse.Namespace) -> dict[str, Method]:
    return {name: build(scene) for name, build in options.methods.items() if name != "torch"}


# Bytes


def bytes_(arena: HostArena, pinned: torch.Tensor, options: argparse.Namespace) -> None:
    """Through the region, pinned slice by slice: into poisoned memory, and with one byte damaged on the host."""
    for fragment, count in ((4, 512), (18, 100), (2048, 1)):
        scene = Scene(arena, pinned, fragment * KIB, count, 256 * MIB, "random")
        scene.host[scene.host_blocks] = POISON
        wanted = [tensor[scene.device_blocks] for tensor in scene.tensors]
        copier, copies = scene.copier(), scene.copies()
        copier.copy(STORE, copies)
        for text, is_right in (("come back", True), ("one damaged on the host is noticed", False)):
            for tensor in scene.tensors:
                tensor.fill_(POISON)
            copier.copy(LOAD, copies)
            pairs = zip(scene.tensors, wanted, strict=True)
            same = all(torch.equal(tensor[scene.device_blocks], rows) for tensor, rows in pairs)
            line(f"{fragment:>5} KiB x {count:<4} bytes: {text}", same == is_right)
            scene.host[scene.host_blocks[-1], -1] ^= 1


# Rates, one way


def rates(arena: HostArena, pinned: torch.Tensor, options: argparse.Namespace) -> None:
    large = Large(pinned, GIB)
    link = {direction: median(sustained(large, [direction]) for _ in range(5)) for direction in Direction}
    line(f"large pinned copies of 1 GiB: store {link[STORE]:.1f} GB/s, load {link[LOAD]:.1f} GB/s")
    for block_kib, placed in ((2048, "random"), (256, "pool")):
        line(f"host blocks of {block_kib} KiB, {placed}: GB/s (share of the large copy), host time to submit")
        for fragment in (*FRAGMENTS, block_kib):
            one_size(arena, pinned, fragment * KIB, block_kib // fragment, placed, link, options)


def one_size(
    arena: HostArena,
    pinned: torch.Tensor,
    fragment: int,
    count: int,
    placed: str,
    link: dict[Direction, float],
    options: argparse.Namespace,
) -> None:
    scene = Scene(arena, pinned, fragment, count, GIB, placed)
    few = Scene(arena, pinned, fragment, count, min(TORCH_FRAGMENTS * fragment, GIB), placed)
    submit: dict[tuple[str, Direction], float] = {}
    for name, build in options.methods.items():
        if options.quick and name not in ("staged", "batch"):
            continue
        method = build(few if name == "torch" else scene)
        for direction in Direction:
            repeats = 9 if name == "staged" else 2
            host = measured(method, direction, repeats)[1]
            seconds = 0.15 if name == "staged" else 0.02
            rate = median(sustained(method, [direction], seconds) for _ in range(repeats))
            share, submit[name, direction] = rate / link[direction], host / method.num_bytes
            text = f"{fragment // KIB:>5} KiB x {count:<4} {name:<7}{direction.value:<5} {rate:6.1f} ({share:6.1%})"
            text += f"  submit {host / method.num_bytes * GIB * 1e3:7.2f} ms/GiB"
            line(text, share >= (0.95, 0.98)[direction is LOAD] if name == "staged" else None)
            options.rows.append((name, fragment, count, placed, direction.value, rate, link[direction], host))
    for direction in Direction:
        ours, theirs = submit["staged", direction], submit.get(("batch", direction))
        share, ratio = ours * link[direction] * 1e9, 0.0 if theirs is None else ours / theirs
        text = f"{fragment // KIB:>5} KiB x {count:<4} submit {direction.value:<5}: {share:.2f} of the time on the link"
        text += "" if theirs is None else f", {ratio:.2f} of the peer's"
        # for blocks of one fragment both methods submit the same list of copies
        line(text, share <= 0.25 and (ratio <= 0.5 or count == 1))


# Both ways at once


def both(arena: HostArena, pinned: torch.Tensor, options: argparse.Namespace) -> None:
    for fragment, bar in ((16, 85), (64, 93)):
        scene = Scene(arena, pinned, fragment * KIB, 2048 // fragment, GIB, "random")
        for name, method in beside_each_other(scene, options).items():
            seconds, repeats = (0.15, 5) if name == "staged" else (0.02, 3)
            rate = median(sustained(method, list(Direction), seconds) for _ in range(repeats))
            kept = rate >= bar if name == "staged" else None
            line(f"both ways at once, {fragment} KiB, {name}: {rate:.1f} GB/s", kept)
    rate = median(sustained(Large(pinned, GIB), list(Direction)) for _ in range(5))
    line(f"both ways at once, large copies: {rate:.1f} GB/s")


# One request


def requests(arena: HostArena, pinned: torch.Tensor, options: argparse.Namespace) -> None:
    for block_kib, placed, fragment in ((2048, "random", 16), (2048, "random", 64), (256, "pool", 64)):
        for size, bar in ((32 * MIB, 1.12), (256 * MIB, 1.04)):
            scene = Scene(arena, pinned, fragment * KIB, block_kib // fragment, size, placed)
            staged, large = Staged(scene), Large(pinned, size)
            for method in (staged, large):
                measured(method, LOAD, 10)
            pairs = [(measured(staged, LOAD, 1)[0], measured(large, LOAD, 1)[0]) for _ in range(25)]
            ours, limit = (median(times) for times in zip(*pairs, strict=True))
            text = f"one request's load of {size // MIB} MiB, {fragment} KiB, blocks of {block_kib} KiB {placed}: "
            text += f"{ours * 1e3:.3f} ms, "
            line(text + f"{ours / limit:.3f}x of one large copy", ours / limit <= bar if placed == "random" else None)
            worker = CopyWorker(0, staged.copier, threads=True)
            times = [in_worker(worker, id, LOAD, scene.copies()) for id in range(25)]
            line(f"    through the worker's thread, until it is reported: {median(times) * 1e3:.3f} ms")
            worker.close()


def in_worker(worker: CopyWorker, id: int, direction: Direction, copies: tuple) -> float:
    start = time.perf_counter()
    begin(worker, id, direction, copies)
    while id not in worker.report().done:
        time.sleep(0)
    return time.perf_counter() - start


def begin(worker: CopyWorker, id: int, direction: Direction, copies: tuple) -> int:
    worker.run(StepPlan(0, (TransferPlan(id, direction, copies, 0),)))
    return id


def beside(arena: HostArena, pinned: torch.Tensor, options: argparse.Namespace) -> None:
    """Loads of a request while stores run continuously."""
    for fragment in (16, 64):
        scene = Scene(arena, pinned, fragment * KIB, 2048 // fragment, GIB, "random")
        worker = CopyWorker(0, scene.copier(), threads=True)
        ids, stored = iter(range(1_000_000)), 0
        times: list[float] = []
        load, store = scene.copies(256 * MIB, first=scene.num_blocks // 2), scene.copies(256 * MIB)
        begun = time.perf_counter()
        stores = [begin(worker, next(ids), STORE, store) for _ in range(2)]
        while len(times) < 60:
            start = time.perf_counter()
            id = begin(worker, next(ids), LOAD, load)
            while id not in (done := worker.report().done):
                for at, each in enumerate(stores):
                    if each in done:
                        stores[at] = begin(worker, next(ids), STORE, store)
                        stored += 1
                time.sleep(0)
            times.append(time.perf_counter() - start)
        rate = stored * 256 * MIB / (time.perf_counter() - begun) / 1e9
        p95 = percentile(times, 0.95) * 1e3
        text = f"load of 256 MiB beside stores ({rate:.0f} GB/s), {fragment} KiB: median {median(times) * 1e3:.2f} ms"
        line(f"{text}, p95 {p95:.2f} ms", p95 <= 10)
        worker.close()


def tokens(arena: HostArena, pinned: torch.Tensor, options: argparse.Namespace) -> None:
    """A small copy to the host in the stream of compute, as of the tokens of a step, while stores run continuously."""
    x, y = torch.zeros(1, device=DEVICE), torch.empty(1, pin_memory=True)
    for fragment, count in ((16, 128), (2048, 1)):
        staged = Staged(Scene(arena, pinned, fragment * KIB, count, GIB, "random"))
        times: list[float] = []
        with copying(staged, STORE) as copied:
            time.sleep(0.05)
            begun, before = time.perf_counter(), copied()
            while (start := time.perf_counter()) < begun + 1:
                x += 1
                y.copy_(x, non_blocking=True)
                poll(staged.copier.here())
                times.append(time.perf_counter() - start)
                time.sleep(2e-3)
            rate = (copied() - before) / (time.perf_counter() - begun) / 1e9
        median_ms, p95, most = (percentile(times, share) * 1e3 for share in (0.5, 0.95, 1))
        text = f"tokens beside stores ({rate:.1f} GB/s), {fragment} KiB x {count}: {median_ms:.2f} ms, p95 {p95:.2f}"
        line(f"{text}, at most {most:.2f}", p95 <= 3)


# Compute beside copies


Pair = tuple[float, float, float]


def loops() -> dict[str, Callable[[], None]]:
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE)
    b = torch.randn_like(a)
    x = torch.randn(1 << 29, dtype=torch.bfloat16, device=DEVICE)
    y = torch.empty_like(x)
    token = torch.randn(16, 4096, dtype=torch.bfloat16, device=DEVICE)
    weights = [torch.randn(4096, 14336, dtype=torch.bfloat16, device=DEVICE) for _ in range(16)]

    def gemm() -> None:
        for _ in range(24):
            torch.mm(a, b)

    def hbm() -> None:
        for _ in range(60):
            y.copy_(x)

    def decode() -> None:
        for _ in range(40):
            for weight in weights:
                torch.mm(token, weight)

    return {"GEMM": gemm, "HBM copy": hbm, "decode-like": decode}


def slowdown(arena: HostArena, pinned: torch.Tensor, options: argparse.Namespace) -> None:
    bars = {STORE: (1.03, 1.06, 1.08), LOAD: (1.04, 1.07, 1.14)}
    methods = beside_each_other(Scene(arena, pinned, 16 * KIB, 128, 256 * MIB, "random"), options)
    methods["whole"] = Staged(Scene(arena, pinned, 2 * MIB, 1, 256 * MIB, "random"))  # blocks in one piece
    runs = dict.fromkeys(methods, 3 if options.quick else 5) | {"staged": 3 if options.quick else 15}
    for direction in Direction:
        for (loop, compute), bar in zip(loops().items(), bars[direction], strict=True):
            lost: dict[str, float] = {}
            rate: dict[str, float] = {}
            for name, method in methods.items():
                pairs = [alternating(compute, method, direction, run % 2 == 0) for run in range(runs[name])]
                ratio, rate[name], lost[name] = cost(pairs)
                text = f"{loop} beside {direction.value}s, {name}: {ratio:.3f}x at {rate[name]:.1f} GB/s"
                text += f", {lost[name]:.2f} ms of compute lost per GB"
                line(text, ratio <= bar if isinstance(methods[name], Staged) else None)
            if "batch" in rate and rate["batch"] < 0.98 * rate["staged"]:
                text = f"{loop} beside {direction.value}s: {lost['staged']:.2f} ms lost per GB"
                line(f"{text}, the peer {lost['batch']:.2f}", lost["staged"] <= lost["batch"])


def alternating(compute: Callable[[], None], method: Method, direction: Direction, first: bool) -> Pair:
    """Seconds of `compute` alone (`first` or last) and beside copies, and the bytes a second copied beside it."""
    alone = timed(compute) if first else 0.0
    with copying(method, direction) as copied:
        time.sleep(0.02)
        start, before = time.perf_counter(), copied()
        beside = timed(compute)
        rate = (copied() - before) / (time.perf_counter() - start)
    return (alone if first else timed(compute)), beside, rate


def cost(pairs: Sequence[Pair]) -> tuple[float, float, float]:
    """How many times as long compute takes beside copies, their GB/s, and the ms of compute lost for each GB."""
    ratio = median(beside / alone for alone, beside, _ in pairs)
    lost = median((beside - alone) / max(1, rate * beside) for alone, beside, rate in pairs)
    return ratio, median(rate for _, _, rate in pairs) / 1e9, lost * 1e12


def timed(compute: Callable[[], None]) -> float:
    """Seconds of the second of two runs of `compute`, when clocks and caches have settled."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    compute()
    begin.record()
    compute()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


@contextmanager
def copying(method: Method, direction: Direction) -> Iterator[Callable[[], float]]:
    """Copy continuously in a thread. Yields a function that returns how many bytes have been copied so far."""
    stop, ends = threading.Event(), [0]

    def run() -> None:
        torch.cuda.set_device(DEVICE)
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):  # not the stream of compute, for which copies would wait
            events: list[Event] = []
            while not stop.is_set():
                events.append(method.submit(direction))
                if len(events) > 2:
                    events.pop(0).until_passed()
                    ends[0] += 1
            for event in events:
                event.until_passed()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: ends[0] * method.num_bytes
    finally:
        stop.set()
        thread.join()


# The host region


def region(options: argparse.Namespace) -> HostArena:
    """A host region of 48 GiB, pinned while a loop launches kernels."""
    num_bytes = (8 if options.quick else 48) * GIB
    start = time.perf_counter()
    arena = HostArena(num_bytes // (2 * MIB), 2 * MIB, pinned_for=DEVICE)
    built = time.perf_counter() - start
    line(f"region of {num_bytes / GIB:.0f} GiB: construction {built * 1e3:.0f} ms", built <= 0.5)
    x = torch.zeros(1, device=DEVICE)
    launches(x, lambda: True, 0.5)
    quiet = launches(x, lambda: True, 8)
    start = time.perf_counter()
    arena.register()
    beside = launches(x, lambda: arena.ready_blocks < arena.blocks.shape[0], 60)
    ready = time.perf_counter() - start
    line(f"region: ready {ready:.1f} s after the first step", ready <= 12)
    late, pauses = ([span for span in spans if span > 5e-3] for spans in (beside, quiet))
    text = f"region: of {len(beside)} launches meanwhile {len(late)} took over 5 ms ({max(beside) * 1e3:.1f} at most)"
    text += f"; of {len(quiet)} before it {len(pauses)} ({max(quiet) * 1e3:.1f})"
    line(text, len(late) * len(quiet) <= len(pauses) * len(beside))
    for share in (0.5, 0.99, 0.999, 0.9999):
        within, before = (percentile(spans, share) * 1e3 for spans in (beside, quiet))
        line(f"    {share:.2%} within {within:.3f} ms, before it {before:.3f} ms")
    return arena


def launches(x: torch.Tensor, going: Callable[[], bool], seconds: float) -> list[float]:
    """The time of each kernel launch in a loop, in seconds."""
    spans: list[float] = []
    end = time.perf_counter() + seconds
    while going() and time.perf_counter() < end:
        for _ in range(64):
            start = time.perf_counter()
            x += 1
            spans.append(time.perf_counter() - start)
        torch.cuda.current_stream().synchronize()
    return spans


def ring(arena: HostArena, pinned: torch.Tensor, options: argparse.Namespace) -> None:
    scene = Scene(arena, pinned, 16 * KIB, 128, GIB, "random")
    before = torch.cuda.memory_allocated()
    staged = Staged(scene)
    built = torch.cuda.memory_allocated() - before
    for _ in range(5):
        for direction in Direction:
            staged.submit(direction).until_passed()
    after = torch.cuda.memory_allocated() - before
    text = f"device memory of the rings: {built / MIB:.1f} MiB, after 10 GiB {after / MIB:.1f} MiB"
    line(text, after <= 128 * MIB)


# All sections


def describe() -> None:
    """The machine, its device, and the link between them."""
    print_environment(["torch"])
    print(f"device: {name_of(DEVICE)}, Triton {triton.__version__}; {torch.cuda.get_device_properties(DEVICE)}")
    address = accelerator_driver().pci_address(DEVICE.index)
    link = [Path("/sys/bus/pci/devices", address, name) for name in ("current_link_speed", "current_link_width")]
    width = " x ".join(file.read_text().strip() if file.exists() else "unknown" for file in link)
    print(f"link: {width} (its state now; at rest it may be slower); the bars are those of an H200 at 32 GT/s x 16")


def coded(arena: HostArena, pinned: torch.Tensor, options: argparse.Namespace) -> None:
    """Bytes of KV a second with codec "exponent" and without, in turn; one request; and both bits compared."""
    for fragment, count in ((16, 128), (64, 32), (2048, 1)):
        scenes = {
            codec: Scene(arena, pinned, fragment * KIB, count, GIB, "random", codec) for codec in ("none", "exponent")
        }
        methods = {codec: Staged(scene) for codec, scene in scenes.items()}
        coded_comes_back(scenes["exponent"], methods["exponent"])
        for directions in ((STORE,), (LOAD,), tuple(Direction)):
            rates: dict[str, list[float]] = {codec: [] for codec in methods}
            for _ in range(7):
                for codec, method in methods.items():
                    rates[codec].append(sustained(method, directions, 0.1))
            raw, ours = (median(each) for each in rates.values())
            name = " and ".join(each.value for each in directions)
            bar = {(STORE,): 68, (LOAD,): 68 if fragment == 16 else 70}.get(directions)
            text = (
                f"{fragment:>5} KiB x {count:<4} {name}: coded {ours:.1f} GB/s of KV, raw {raw:.1f}: {ours / raw:.2f}"
            )
            line(text, None if bar is None else ours >= bar)
        for size in (32 * MIB, 256 * MIB):
            small = [Staged(Scene(arena, pinned, fragment * KIB, count, size, "random", codec)) for codec in methods]
            times = [[measured(method, LOAD, 1)[0] for method in small] for _ in range(25)][5:]
            raw, ours = (median(each) * 1e3 for each in zip(*times, strict=True))
            line(f"{fragment:>5} KiB x {count:<4} one load of {size // MIB} MiB: coded {ours:.3f} ms, raw {raw:.3f}")
    coded_slowdown(arena, pinned, 5 if options.quick else 15)


def coded_slowdown(arena: HostArena, pinned: torch.Tensor, repeats: int) -> None:
    """Compute that is lost beside copies, for each GB of KV, of which both codecs have to move as much."""
    codecs = ("none", "exponent")
    methods = [Staged(Scene(arena, pinned, 16 * KIB, 128, 256 * MIB, "random", codec)) for codec in codecs]
    for direction in Direction:
        for loop, compute in loops().items():
            each: list[list[Pair]] = [[] for _ in codecs]
            for run in range(repeats):
                for method, pairs in zip(methods, each, strict=True):
                    pairs.append(alternating(compute, method, direction, run % 2 == 0))
            for codec, pairs in zip(codecs, each, strict=True):
                ratio, rate, lost = cost(pairs)
                text = f"{loop} beside {direction.value}s, codec {codec}: {ratio:.3f}x at {rate:.1f} GB/s of KV"
                line(f"{text}, {lost:.2f} ms of compute lost per GB")


def coded_comes_back(scene: Scene, method: Staged) -> None:
    wanted = [tensor[scene.device_blocks] for tensor in scene.tensors]
    event = method.submit(STORE)
    event.until_passed()
    for is_right in (True, False):
        for tensor in scene.tensors:
            tensor[scene.device_blocks] = POISON
        method.submit(LOAD).until_passed()
        pairs = zip(scene.tensors, wanted, strict=True)
        same = all(torch.equal(tensor[scene.device_blocks], rows) for tensor, rows in pairs)
        line(f"coded: bits {'come back' if is_right else 'damaged on the host are noticed'}", same == is_right)
        scene.host[scene.host_blocks[-1], 5] ^= 1
    line(f"coded: {len(event.unfit())} of {scene.num_blocks} blocks do not fit", not event.unfit())


SECTIONS = {
    "coded": coded,
    "bytes": bytes_,
    "rates": rates,
    "both": both,
    "requests": requests,
    "beside": beside,
    "tokens": tokens,
    "slowdown": slowdown,
    "ring": ring,
}


def contract() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/copier/test_contract.py"]
    result = subprocess.run(command, env={**os.environ, "COPIER_DEVICE": "cuda"}, cwd=root, check=False)
    line("the contract of copiers, on the device", result.returncode == 0)


COLUMNS = ("method", "fragment_bytes", "fragments", "host_blocks", "direction", "gb_per_s", "link_gb_per_s")


def write_csv(path: str, rows: Sequence[tuple]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((*row[:5], f"{row[5]:.2f}", f"{row[6]:.2f}") for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--csv", help="write the rates to this file")
    parser.add_argument(
        "--only",
        default=",".join(["contract", *SECTIONS]),
        help="sections, with commas between them (all: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs, a smaller region, ours and one peer only")
    options = parser.parse_args()
    options.rows = []
    if not torch.cuda.is_available():
        print("copies.py needs a CUDA or HIP device", file=sys.stderr)
        return 2
    describe()
    if "contract" in options.only:
        contract()
    arena = region(options)
    pinned = torch.empty(4 * GIB, dtype=torch.uint8, pin_memory=True)
    options.methods = peers(arena, pinned)
    for name, section in SECTIONS.items():
        if name in options.only.split(","):
            begin = time.perf_counter()
            try:
                section(arena, pinned, options)
            except Exception:  # shown, so that one run on someone else's machine prints all that it can
                traceback.print_exc(file=sys.stdout)
                line(f"the section {name} failed", False)
            print(f"     [{name}: {time.perf_counter() - begin:.0f} s]", flush=True)
    if options.csv and options.rows:
        write_csv(options.csv, options.rows)
    arena.close()
    missed = [text for kept, text in RESULTS if kept is False]
    print(f"{len(missed)} bars missed:" if missed else "every bar was kept")
    for text in missed:
        print("     " + text)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
