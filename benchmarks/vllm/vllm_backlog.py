"""First tokens of prompts that a tier has, on vLLM's real scheduler with a modelled GPU, link and tier. Needs no GPU.

    python -m benchmarks.vllm.vllm_backlog [--slots 8 256] [--every 0 1] [--tier-gb 8]

    at lookup    the tier is read for a request when vLLM first looks it up: when it has a slot and tokens to compute
    queued       and from when it is queued

Each prompt was served before, and has left device and host since; it comes back with `--new` tokens behind it, all at
once or one `--every` so many seconds. `--slots` is how many requests run at once. Time is virtual, as in
`serve_simulated.py`: a step, a load and a read take what they took on one H200; reads come one after the other.
"""

import argparse
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput

from benchmarks.vllm import serve_simulated, vllm_simulated
from connector.vllm.messages import StepMetadata
from cpu_prefix_cache.deciding import Direction, RankReport
from cpu_prefix_cache.tier import TierReport

BLOCK = 64  # tokens
ANSWER = 64
LLAMA_8B = FullAttentionSpec(block_size=BLOCK, num_kv_heads=256, head_size=128, dtype=torch.bfloat16)  # all layers


class MachineWithTier(serve_simulated.Machine):
    """Writes take no time."""

    def __init__(self, host_blocks: int, tier_gb: float) -> None:
        super().__init__(host_blocks, 1 / (serve_simulated.LINK_GB_PER_SECOND * 1e9))
        self._rate = tier_gb * 1e9
        self._free_below = 0.0
        self._ends_below: dict[int, float] = {}
        self._done_below: set[int] = set()

    def begin(self, metadata: StepMetadata, now: float) -> float:
        plan = metadata.tier.step
        self._done_below = {id for id in self._done_below if id >= plan.resolved_below} - set(plan.resolved)
        for each in plan.transfers:
            is_read = each.direction is Direction.LOAD and not each.failed
            begins = max(now, self._free_below if is_read else 0.0)
            self._ends_below[each.id] = begins + (each.num_bytes / self._rate if is_read else 0.0)
            self._free_below = max(self._free_below, self._ends_below[each.id])
        return super().begin(metadata, now)

    def look(self, metadata: StepMetadata, now: float) -> KVConnectorOutput:
        ended = {id for id, end in self._ends_below.items() if end <= now}
        self._done_below |= ended
        for id in ended:
            del self._ends_below[id]
        below = TierReport(
            RankReport(0, frozenset(self._done_below), load_bytes_per_second=self._rate), is_scanned=True, portion=0
        )
        output = super().look(metadata, now)
        output.kv_connector_worker_meta.tier = (below,)
        return output


class Backlog(serve_simulated.Serving):
    """Prompts are numbers. `first_tokens` are those of the prompts that came back."""

    def __init__(self, folder: Path, args: argparse.Namespace, slots: int, is_queued: bool) -> None:
        device, host = args.device_blocks, args.host_blocks
        size = 4 * (args.prompts + self._others(args)) * args.tokens // BLOCK * (LLAMA_8B.page_size_bytes + 4096)
        tier = {"kind": "file", "path": str(folder), "bytes": size, "revision": "none", "offload": "eager"}
        options = {"offload": "eager", "tier": tier}
        sizes = vllm_simulated.Sizes(device, host, requests=slots)
        model = vllm_simulated.Model((LLAMA_8B,))
        self._engine = vllm_simulated.Engine((vllm_simulated.OURS, options), folder, sizes, model=model)
        self._half = self._engine.scheduler.connector.scheduler
        self._half.clock = lambda: self.now
        if not is_queued:
            self._half.tier.queued = lambda request, now: None
        self.machine = MachineWithTier(host, args.tier_gb)
        self._args = args
        self._owners: dict[str, Any] = {}
        self._unanswered: set[str] = set()
        self._coming: deque[tuple[float, int]] = deque()
        self._new = 1
        self.now = 0.0
        self.steps = self.prompt_tokens = 0
        self.first_tokens: list[float] = []

    @staticmethod
    def _others(args: argparse.Namespace) -> int:
        """How many other prompts make device and host forget those that come back."""
        return 2 + (args.device_blocks + args.host_blocks) * BLOCK // args.tokens

    def measure(self, every: float) -> None:
        for prompt in range(self._args.prompts + self._others(self._args)):
            self._coming.append((self.now, prompt))
            self.run()
        self._new = self._args.new
        self.first_tokens.clear()
        self._coming.extend((self.now + at * every, at) for at in range(self._args.prompts))
        self.run()

    def run(self) -> None:
        while self._coming or self._owners or self._half.has_transfers():
            while self._coming and self._coming[0][0] <= self.now:
                self._comes(*self._coming.popleft())
            if not self._owners and self._coming:
                self.now = max(self.now, self._coming[0][0])
            self._step()

    def _step(self) -> None:
        scheduler = self._engine.scheduler
        output, result, end = self._launch(scheduler.schedule())
        self.now = max(self.now, end) + serve_simulated.UPDATE_SECONDS
        for outputs in scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                self._answered(each)

    def _comes(self, at: float, prompt: int) -> None:
        first = prompt * self._args.tokens
        known = [each % 1000 + 1000 * prompt for each in range(first, first + self._args.tokens)]
        id = self._engine.submit(known + [999_000 + prompt] * self._new, ANSWER).request_id
        self._owners[id] = at, prompt
        self._unanswered.add(id)

    def _answered(self, output: Any) -> None:
        if output.new_token_ids and output.request_id in self._unanswered:
            self._unanswered.remove(output.request_id)
            self.first_tokens.append(self.now - self._owners[output.request_id][0])
        if output.finished:
            del self._owners[output.request_id]


def rows(args: argparse.Namespace) -> Iterator[str]:
    yield "| slots | one every, s | read | first token, s: mean | 50 % | last | from the tier | too late, computed |"
    yield "| --: | --: | --- | --: | --: | --: | --: | --: |"
    for slots in args.slots:
        for every in args.every:
            for name in ("at lookup", "queued"):
                with vllm_simulated.model_folder() as folder:
                    served = Backlog(folder, args, slots, is_queued=name == "queued")
                    served.measure(every)
                first, tier = served.first_tokens, served._half.tier.tier_statistics()
                share = tier.hit_tokens / args.tokens / args.prompts
                yield (
                    f"| {slots} | {every:g} | {name} | {fmean(first):.2f} | {median(first):.2f} | {max(first):.2f} | "
                    f"{share:.2f} | {tier.late}, {tier.declined} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 256])
    parser.add_argument("--every", type=float, nargs="+", default=[0, 1])
    parser.add_argument("--tier-gb", type=float, default=8.0)
    parser.add_argument("--device-blocks", type=int, default=2048)
    parser.add_argument("--host-blocks", type=int, default=4096)
    args = parser.parse_args()
    vllm_simulated.Scheduler = AsyncScheduler
    for row in rows(args):
        print(row, flush=True)


if __name__ == "__main__":
    main()
