"""Requests in ATOM's real scheduler, stepped by seed, with everything that may happen to them.

    python -m tests.engines.atom.simulation VARIANT [REQUESTS] [SEED]

A story is drawn: prompts that share prefixes of many lengths, whole multiples of a block among them, and answers of
earlier prompts with something behind them; some are aborted, in whatever phase they happen to be. The device is small:
prompts are evicted and come back from the host, and requests are preempted.
"""

import logging
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.engines.atom import source  # noqa: F401  # before ATOM is imported
from tests.support.troubled_copiers import COPIERS

# isort: split
from atom.model_engine.sequence import SequenceStatus

import connector.atom.worker
from cpu_prefix_cache.deciding import CacheStatistics
from tests.engines.atom import mends
from tests.engines.atom.engine import VOCABULARY, Engine, config_of, transfer_config
from tests.engines.atom.pools import pools

MOST_ALIVE, PATIENCE = 20, 30  # requests, steps
RESETS = 0.03  # the chance of each step
# How often a request is aborted in each phase, in units of the variant's chance: most phases are short.
PHASES = {"queued": 0.3, "loading": 10, "loaded": 20, "prefill": 20, "decode": 1, "preempted": 10}


@dataclass(frozen=True)
class Variant:
    """`host_blocks` of 0: ATOM alone. `aborts` is the chance of each live request in each step."""

    offload: str = "lazy"
    host_blocks: int = 512
    device_blocks: int = 96
    ranks: int = 1
    policy: str = "lru"
    copies: str = "as it is"
    aborts: float = 0.004
    longest: int = 160  # tokens of a prompt
    chunked: bool = True
    max_output: int = 6
    dcp: int = 1
    reset: bool = False  # now and then the weights change, and ATOM clears its cache
    max_tokens: int = 64
    defers: bool = False
    pool: str = "lru"  # of POOLS


def variants() -> dict[str, Variant]:
    found = {}
    for offload in ("lazy", "eager"):
        plain = Variant(offload)
        found |= {
            f"{offload}": plain,
            f"{offload}, deferred tokens": replace(plain, defers=True),
            f"{offload}, deferred tokens, late, answers": replace(plain, defers=True, copies="late", max_output=40),
            f"{offload}, two ranks, late": replace(plain, ranks=2, copies="late"),
            f"{offload}, copies fail": replace(plain, ranks=2, copies="fails"),
            f"{offload}, preempted": replace(
                plain, device_blocks=44, chunked=False, max_output=24, longest=120, max_tokens=160, copies="late"
            ),
            f"{offload}, small host, arc": replace(plain, host_blocks=100, policy="arc", aborts=0.02),
            f"{offload}, resets": replace(plain, reset=True, copies="late"),
            f"{offload}, shared contexts": replace(plain, dcp=2, ranks=2),
        }
    lazy, eager = found["lazy"], found["eager"]
    return found | {
        "lazy, slru": replace(lazy, pool="slru"),
        "lazy, slru, late, arc": replace(lazy, pool="slru", copies="late", policy="arc", host_blocks=200),
        "lazy, slru, deferred tokens, answers": replace(lazy, pool="slru", defers=True, max_output=40),
        "lazy, slru, two ranks, late, resets": replace(lazy, pool="slru", ranks=2, copies="late", reset=True),
        "lazy, slru, preempted": replace(found["lazy, preempted"], pool="slru"),
        "eager, slru, two ranks, late, resets": replace(eager, pool="slru", ranks=2, copies="late", reset=True),
        "lazy, superblocks": replace(lazy, pool="superblocks", copies="late"),
    }


VARIANTS = variants()
CONTROL = replace(Variant("eager"), copies="corrupts")
ALONE = Variant(host_blocks=0)


@dataclass
class Outcome:
    steps: int
    wrong: int
    unwritten: int
    compared: int
    finished: dict[str, int]
    aborted: dict[str, int]  # by phase
    preemptions: int
    cache: CacheStatistics | None
    leaks: list[str]


class Simulation:
    def __init__(self, variant: Variant, seed: int) -> None:
        self.variant, self.draw = variant, random.Random(seed)
        self.prefixes = [self.tokens(self.draw.randrange(4, variant.longest)) for _ in range(24)]
        self.aborted: Counter[str] = Counter()
        self.ids = self.still = 0
        options = dict(offload=variant.offload, policy=variant.policy)
        transfer = transfer_config(variant.host_blocks, variant.ranks, **options) if variant.host_blocks else {}
        self.engine = self.new_engine(
            config_of(
                kv_transfer_config=transfer,
                num_kvcache_blocks=variant.device_blocks,
                tp_world_size=variant.ranks,
                decode_context_parallel_size=variant.dcp,
                enable_chunked_prefill=variant.chunked,
                max_num_batched_tokens=variant.max_tokens,
            ),
            defers=variant.defers,
        )
        self.mend()

    def mend(self) -> None:
        if self.variant.reset:
            mends.chunks_computed_from_before_a_reset_are_not_found(self.engine)
        if self.variant.chunked or self.variant.defers:
            mends.answers_of_preempted_requests_are_prompt(self.engine)
        if self.variant.defers:
            mends.hashes_of_answers_wait_for_a_token(self.engine)
            mends.aborted_requests_compute_what_they_have(self.engine)

    def new_engine(self, config: Any, defers: bool) -> Engine:
        return Engine(config, defers)

    def tokens(self, number: int) -> list[int]:
        return [self.draw.randrange(VOCABULARY) for _ in range(number)]

    def prompt(self) -> list[int]:
        prefix = self.draw.choice(self.prefixes)
        kept = self.draw.randrange(1, len(prefix) + 1)
        if self.draw.random() < 0.3:
            kept -= kept % 4  # S5.6: a prompt that ends with a block
        tokens = prefix[:kept] + self.tokens(self.draw.choice((0, 0, 1, 3, 4, 9)))
        return (tokens or [7])[: self.variant.longest]

    def run(self, requests: int) -> Outcome:
        engine, left = self.engine, requests
        while left or not engine.is_idle:
            room = max(0, MOST_ALIVE - len(engine.sequences))
            for _ in range(min(left, room, self.draw.choice((0, 0, 0, 1, 1, 2, 4)))):
                left -= 1
                self.ids += 1
                engine.add(self.prompt(), self.draw.randrange(1, self.variant.max_output), id=self.ids)
            self.abort_some()
            if self.variant.reset and self.draw.random() < RESETS:
                engine.change_weights()
            before, moved = dict(engine.sequences), (engine.counts.compared, engine.counts.finished.total())
            for seq in engine.step():
                if seq.leave_reason == "max_tokens" and self.draw.random() < 0.2:  # the next turn of a conversation
                    self.prefixes[self.draw.randrange(len(self.prefixes))] = before[seq.id].token_ids[: seq.num_tokens]
            self.still = 0 if moved != (engine.counts.compared, engine.counts.finished.total()) else self.still + 1
            if self.still > PATIENCE and engine.sequences:
                raise RuntimeError(f"nothing has moved for {PATIENCE} steps: {engine.sequences}")
            if engine.connector is not None and engine.counts.steps % 16 == 0:
                engine.connector.cache.check_valid()
            if engine.counts.steps > 100 * requests + 1000:
                raise RuntimeError(f"requests are stuck: {engine.sequences}")
        return self.outcome()

    def abort_some(self) -> None:
        for seq in list(self.engine.sequences.values()):
            if seq.status is not SequenceStatus.ABORTED:
                phase = self.phase(seq)
                if self.draw.random() < self.variant.aborts * PHASES[phase]:
                    self.aborted[phase] += 1
                    self.engine.abort(seq)

    def phase(self, seq: Any) -> str:
        if seq.status is SequenceStatus.WAITING_FOR_REMOTE_KVS:
            scheduler = self.engine.scheduler
            over = scheduler.finished_recving_kv_req_ids + scheduler.failed_recving_kv_req_ids
            return "loaded" if seq.id in over else "loading"
        if seq.status is SequenceStatus.RUNNING:
            return "prefill" if seq.is_partial_prefill else "decode"
        return "preempted" if seq.num_tokens > seq.num_prompt_tokens else "queued"

    def outcome(self) -> Outcome:
        engine, counts = self.engine, self.engine.counts
        return Outcome(
            counts.steps,
            counts.wrong,
            int(counts.unwritten),
            counts.compared,
            dict(counts.finished),
            dict(self.aborted),
            engine.scheduler.total_preemptions,
            engine.connector.cache.statistics() if engine.connector else None,
            list(self.leaks()),
        )

    def leaks(self):
        """Counts that must be 0 in an engine at rest."""
        scheduler = self.engine.scheduler
        pool = self.engine.manager.kv
        connector = self.engine.connector
        rest = {
            "blocks in use": pool.num_used,
            "blocks that are not free": pool.num_blocks - pool.num_free,
            "blocks with references": sum(block.ref_count for block in pool.blocks),
            "requests in the scheduler": len(scheduler.waiting) + len(scheduler.running),
            "requests that wait for a load": scheduler._num_parked_remote_kv,
            "requests whose blocks are kept": len(scheduler.deferred_free_blocks),
            "ends of loads that nobody took": len(scheduler.finished_recving_kv_req_ids)
            + len(scheduler.failed_recving_kv_req_ids),
        }
        if connector is not None:
            connector.cache.check_valid()
            statistics = connector.cache.statistics()
            rest |= {
                "admitted requests": len(connector._live) + statistics.running,
                "loads": len(connector._loading),
                "transfers": statistics.storing + statistics.loading,
                "pins on host blocks": statistics.pool.pinned,
                "reports waiting for other ranks": self.engine.aggregator.pending_count[1],
            }
        return [f"{number} {what}" for what, number in rest.items() if number]


def simulate(variant: Variant, requests: int, seed: int = 1, kind: type[Simulation] = Simulation) -> Outcome:
    """Every rank's copier behaves as in the variant."""
    choose = connector.atom.worker.choose_copier
    connector.atom.worker.choose_copier = troubled(choose, COPIERS[variant.copies])
    try:
        with pools(variant.pool):
            return kind(variant, seed).run(requests)
    finally:
        connector.atom.worker.choose_copier = choose


def troubled(choose: Callable[..., Any], wrap: Callable[..., Any]) -> Callable[..., Any]:
    def choose_and_wrap(shapes, tensors, *arguments, **options):
        choice = choose(shapes, tensors, *arguments, **options)
        return replace(choice, copier=wrap(choice.copier, tensors))

    return choose_and_wrap


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    name, requests, seed = (*sys.argv[1:], "1000", "1")[:3] if len(sys.argv) < 4 else sys.argv[1:]
    print(simulate({"control": CONTROL, "alone": ALONE, **VARIANTS}[name], int(requests), int(seed)))
