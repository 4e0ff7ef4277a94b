"""Faults of a disk, a process and an operator, with a tier of ours and with vLLM's own tier in files.

    python -m tests.vllm.tier_faults        prints benchmarks/results/vllm_tier_faults.txt

In each story a server stores the chunks "abcd", something happens, and a server with an empty host memory wants
them. The answer has a letter for each chunk that was served right, "." for one that is computed, "?" for wrong bytes.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.secondary import ROW, Server, ours, theirs

PROMPT = "abcd"
DISK_BYTES = 3 << 19  # room for a tier of ours, and little more


class Bed:
    """A folder with a model and a tier of one kind."""

    def __init__(self, folder: Path, kind: Callable[..., dict[str, Any]]) -> None:
        self.files, self.model, self._kind = folder / "tier", folder / "model", kind
        self.files.mkdir(exist_ok=True)
        self.model.mkdir(exist_ok=True)
        self.train("1")

    def train(self, weights: str) -> None:
        """Other weights under the same path."""
        (self.model / "model.safetensors").write_bytes(weights.encode() * 1000)
        self.weights = weights

    def server(self, **described: Any) -> Server:
        tier = theirs(self.files) if self._kind is theirs else ours(self.files, revision=None)
        return Server(tier, self.weights, **{"model": str(self.model), **described})

    def fill(self, prompt: str = PROMPT) -> None:
        with closing(self.server()) as server:
            server.compute(prompt)

    def ask(self, prompt: str = PROMPT, **described: Any) -> str:
        with closing(self.server(**described)) as server:
            return server.ask(prompt)

    def chunks(self) -> list[tuple[Path, int]]:
        """File of each chunk, and where in it the chunk begins."""
        if self._kind is theirs:
            return [(each, 0) for each in sorted(self.files.rglob("*.bin"))]
        (blocks,) = self.files.rglob("blocks")
        data = blocks.read_bytes()
        return [(blocks, at) for at in range(0, len(data), ROW) if any(data[at : at + ROW])]

    def rewrite(self, change: Callable[[bytes], bytes]) -> None:
        """Change the bytes of every chunk, and nothing else."""
        for path, at in self.chunks():
            with path.open("r+b") as file:
                file.seek(at)
                old = file.read(ROW)
                file.seek(at)
                file.write(change(old))


def nothing(bed: Bed) -> str:
    bed.fill()
    return bed.ask()


def flipped_bit(bed: Bed) -> str:
    bed.fill()
    bed.rewrite(lambda old: bytes([old[0] ^ 1]) + old[1:])
    return bed.ask()


def lost_pages(bed: Bed) -> str:
    """The machine lost its power: names and sizes were written, and half of the bytes were not."""
    bed.fill()
    bed.rewrite(lambda old: old[: ROW // 2] + bytes(ROW // 2))
    return bed.ask()


def misplaced_write(bed: Bed) -> str:
    """Two chunks have each other's bytes."""
    bed.fill()
    contents = [path.read_bytes()[at : at + ROW] for path, at in bed.chunks()]
    turned = iter(contents[1:] + contents[:1])
    bed.rewrite(lambda _: next(turned))
    return bed.ask()


def killed(bed: Bed, kills: int = 10) -> str:
    """The process is killed while it writes, again and again. The last prompts are wanted each time."""
    answers = ""
    for number in range(kills):
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            _write_until_killed(bed, writes)
        os.close(writes)
        with open(reads, "rb", buffering=0) as file:
            begun = len(file.read(1)) + len(file.read(1))  # so the first prompt is written
            time.sleep(0.01 * number)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            begun += len(file.read())
        answers += "".join(bed.ask(_numbered(at)) for at in range(max(0, begun - 3), begun))
        Path(f"/dev/shm/vllm_offload_killed-{child}.mmap").unlink()
    return answers


def _write_until_killed(bed: Bed, progress: int) -> None:
    """For each prompt that begins a byte is sent."""
    try:
        server = bed.server(engine=f"killed-{os.getpid()}")
        for at in range(5000):
            os.write(progress, b".")
            server.compute(_numbered(at), waits=at % 2 == 0)
    finally:
        os._exit(1)


def _numbered(at: int) -> str:
    """Prompt number `at`, of as many chunks as PROMPT."""
    return "".join(chr(0x4E00 + len(PROMPT) * at + each) for each in range(len(PROMPT)))


def full_disk(bed: Bed) -> str:
    """Twice as many chunks as the disk has room for. The last four are wanted."""
    with _small_disk(bed.files):
        with closing(bed.server()) as server:
            for at in range(2 * DISK_BYTES // ROW // len(PROMPT)):
                server.compute(_numbered(at))
            server.compute(PROMPT)
        return bed.ask()


@contextmanager
def _small_disk(path: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
        if mounted.returncode == 0:
            subprocess.run(["umount", folder], check=True)
        return mounted.returncode == 0


def other_weights(bed: Bed) -> str:
    """A restart with another model under the same path."""
    bed.fill()
    bed.train("2")
    return bed.ask()


def other_dtype(bed: Bed) -> str:
    bed.fill()
    bed.weights = "other dtype"  # which makes other bytes
    return bed.ask(dtype="bfloat16")


def new_weights(bed: Bed) -> str:
    """A trainer sends new weights to a server that runs, and resets it."""
    with closing(bed.server()) as server:
        server.compute(PROMPT)
        server.reset(weights="2")
        return server.ask(PROMPT)


STORIES: dict[str, Callable[[Bed], str]] = {
    "nothing, a restart": nothing,
    "a flipped bit in each chunk on disk": flipped_bit,
    "the second half of each chunk lost by a machine without power": lost_pages,
    "chunks exchanged by a misplaced write": misplaced_write,
    "the process killed while it writes, ten times": killed,
    "a disk that is full; the newest chunks": full_disk,
    "a restart with other weights under the same path": other_weights,
    "a restart with another KV dtype": other_dtype,
    "new weights in a running server, and a reset": new_weights,
}


def main() -> None:
    print("| | with ours | with vLLM's `fs` |\n|---|---|---|")
    for name, story in STORIES.items():
        cells = []
        for kind in (ours, theirs):
            with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
                served = story(Bed(Path(folder), kind))
            right, wrong, computed = sum(each not in "?." for each in served), served.count("?"), served.count(".")
            cells.append(f"{right} right, {computed} computed, {wrong} wrong")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
