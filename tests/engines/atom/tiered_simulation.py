"""The simulation over a tier of files: everything that may happen to requests, and to reads of the disk.

    python -m tests.engines.atom.tiered_simulation VARIANT [REQUESTS] [SEED]

The host has room for a fifth of the prompts. Reads take their time, fail, or bring bytes that were not written.
"""

import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from tests.engines.atom import source  # noqa: F401  # before ATOM is imported

# isort: split
from cpu_prefix_cache.tier import TierStatistics
from cpu_prefix_cache.tiers.tiered_cache import LEASE_SECONDS
from tests.engines.atom.engine import Engine
from tests.engines.atom.simulation import Outcome, Simulation, Variant, simulate
from tests.engines.atom.tiered import TieredEngine, config_over

LIMITS = ("decode_context_parallel_size", "enable_chunked_prefill", "max_num_batched_tokens")


@dataclass(frozen=True)
class TieredVariant(Variant):
    """`fails` and `lies` are the chances of each read."""

    host_blocks: int = 96
    below: str = "lazy"
    fails: float = 0.0
    lies: float = 0.0
    slow: float = 0.0  # seconds


def variants() -> dict[str, TieredVariant]:
    found = {}
    for below in ("lazy", "eager"):
        plain = TieredVariant("lazy", below=below)
        found |= {
            f"{below}": plain,
            f"{below}, reads fail and lie": replace(plain, fails=0.02, lies=0.1),
            f"{below}, two ranks, slow, aborts": replace(plain, ranks=2, slow=0.003, lies=0.02, aborts=0.02),
            f"{below}, eager host, late, deferred": replace(plain, offload="eager", copies="late", defers=True),
            f"{below}, resets": replace(plain, reset=True, copies="late", offload="eager"),
            f"{below}, preempted": replace(
                plain, device_blocks=44, chunked=False, max_output=24, longest=120, max_tokens=160, copies="late"
            ),
            f"{below}, shared contexts": replace(plain, dcp=2, ranks=2),
        }
    return found


VARIANTS = variants()
CONTROL = TieredVariant("eager", copies="corrupts")


@dataclass
class TieredOutcome(Outcome):
    below: TierStatistics


class TieredSimulation(Simulation):
    variant: TieredVariant

    def new_engine(self, config: Any, defers: bool) -> Engine:
        variant = self.variant
        self.folder = tempfile.TemporaryDirectory()
        options = dict(offload=variant.offload, policy=variant.policy, tier={"offload": variant.below})
        sizes = dict(
            host_blocks=variant.host_blocks, slots=8 * variant.host_blocks, device_blocks=variant.device_blocks
        )
        limits = {name: vars(config)[name] for name in LIMITS}
        return TieredEngine(
            config_over(self.folder.name, ranks=variant.ranks, **sizes, **options, **limits), defers=defers
        )

    def run(self, requests: int) -> TieredOutcome:
        try:
            with reading(self.variant, random.Random(requests)):
                outcome = super().run(requests)
            return TieredOutcome(**vars(outcome), below=self.engine.below)
        finally:
            self.engine.close()
            self.folder.cleanup()

    def leaks(self) -> Iterator[str]:
        end = time.monotonic() + LEASE_SECONDS + 1
        while self.engine.connector.cache.statistics().pool.pinned and time.monotonic() < end:
            time.sleep(0.05)
            self.engine.idle()  # leases of requests that were aborted while they waited end by time
        yield from super().leaks()


def simulate_over_files(variant: TieredVariant, requests: int, seed: int = 1) -> TieredOutcome:
    return simulate(variant, requests, seed, TieredSimulation)


@contextmanager
def reading(variant: TieredVariant, draw: random.Random) -> Iterator[None]:
    """Every read of a file behaves as in the variant."""
    read = os.preadv

    def read_otherwise(file: int, buffers: Any, *place: Any) -> int:
        time.sleep(draw.random() * variant.slow)
        if draw.random() < variant.fails:
            raise OSError(5, "Input/output error")
        count = read(file, buffers, *place)
        if draw.random() < variant.lies:
            buffers[-1][0] ^= 1
        return count

    with patch.object(os, "preadv", read_otherwise):
        yield


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    name, requests, seed = (*sys.argv[1:], "300", "1")[:3] if len(sys.argv) < 4 else sys.argv[1:]
    print(simulate_over_files({"control": CONTROL, **VARIANTS}[name], int(requests), int(seed)))
