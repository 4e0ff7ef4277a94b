"""The load of `serve.py` on vLLM's real scheduler with a modelled GPU and link. Needs no GPU; a run takes a minute.

    python -m benchmarks.vllm.serve_simulated TRACE [--connectors ours null] [--host-blocks 20480] [--kept 1.0]
    python -m benchmarks.vllm.serve_simulated TRACE --model hybrid --device-blocks 1000 --host-blocks 2409

    ours    loads and stores take their time on the link: behind the steps and stores that they must wait for, one load
            and one store at a time. The ranks see an end when they have launched a step, and report it when it is over
    null    the same hits, and copies take no time: the bound

Time is virtual. A step takes the GPU and the processor what it took on one H200 with Llama 8B's shape and vLLM 0.33
(`step_report`); two are under way at a time, as with asynchronous scheduling. `--kept` is the share of its bytes in
which a block crosses (.766: coded), `--link` the GB/s of each direction. It is for comparisons of what waits for what,
not for rates of a machine.
"""

import argparse
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from benchmarks.vllm import serve_trace, vllm_simulated
from benchmarks.vllm.vllm_engine import tokens_of
from connector.vllm.ended_loads import EndedLoads
from connector.vllm.messages import StepMetadata, WorkerReports
from cpu_prefix_cache.deciding import Direction, RankReport, TransferPlan

# Of the GPU: a step that only decodes, one with prompts, and each of its tokens; of the processor: a launch of either.
DECODE_SECONDS, PREFILL_SECONDS, TOKEN_SECONDS = 0.009, 0.028, 22.3e-6
LAUNCH_SECONDS, LAUNCH_PREFILL_SECONDS = 0.0013, 0.041
KERNEL_SECONDS = 0.002  # from the begin of a launch to its first kernel, and from its end to that of its last
SCHEDULE_SECONDS, IDLE_SECONDS, UPDATE_SECONDS = 0.0012, 0.0015, 0.0006
MODELS = {"llama": vllm_simulated.LLAMA, "hybrid": vllm_simulated.HYBRID}
LINK_GB_PER_SECOND = 50.0  # of each direction, with both in use
PORTION_SECONDS = 0.0013  # of a load that goes in portions with stores
SOON_SECONDS = 0.018  # the ranks of an idle engine name a load so long before its end
UNDER_WAY = 2  # steps


class Machine:
    """A rank: when its GPU and both directions of its link are free, and when each transfer has ended."""

    def __init__(self, host_blocks: int, scale: float) -> None:
        """`scale` are the seconds that a byte takes on the link."""
        self._host_blocks, self._scale = host_blocks, scale
        self._ends: dict[int, float] = {}
        self._done: set[int] = set()
        self._failed: set[int] = set()
        self._waiting: dict[int, str] = {}  # loads, and their requests
        self._named: set[int] = set()  # loads that vLLM was told of before their end
        self._now = 0.0
        self._reported = EndedLoads(lambda: self._now)
        self._free = dict.fromkeys(Direction, 0.0)
        self.computed = self._computed_before = 0.0  # the ends of the last two steps
        self.latencies: list[float] = []  # of loads, from their plan to their end

    def begin(self, metadata: StepMetadata, now: float) -> float:
        """Begin the copies of a step. When its compute may begin."""
        plan = metadata.plan
        for over in (self._done, self._failed):
            over.difference_update(plan.resolved, [id for id in over if id < plan.resolved_below])
        self._failed |= {each.id for each in plan.transfers if each.failed}
        self._waiting |= metadata.requests
        if not self._scale:
            self._ends |= dict.fromkeys((each.id for each in plan.transfers), now)
            return now
        may_compute, stores = now, dict[int, float]()
        for store in (each for each in plan.transfers if each.direction is Direction.STORE):
            stores[store.id] = max(now, self._after(store), self._free[Direction.STORE])
            self._end(store, stores[store.id] + store.num_bytes * self._scale)
            if store.holds_compute:
                may_compute = max(may_compute, self._ends[store.id])
        for load in (each for each in plan.transfers if each.direction is Direction.LOAD and not each.failed):
            begins = max(now, self._after(load), self._free[Direction.LOAD])
            before = [id for id in load.after if id in stores]
            begins = max([begins, *(stores[id] + PORTION_SECONDS for id in before[:1])])
            after_stores = (self._ends[id] + PORTION_SECONDS for id in before)
            self._end(load, max([begins + load.num_bytes * self._scale, *after_stores]))
            self.latencies.append(self._ends[load.id] - now)
        if metadata.computes and self._named:
            may_compute = max(may_compute, *(self._ends.get(id, 0.0) for id in self._named))
            self._named.clear()
        return may_compute

    def _after(self, transfer: TransferPlan) -> float:
        return self._computed_before if transfer.is_early else self.computed

    def compute(self, seconds: float, begins: float, launched: float) -> float:
        """The end of a step that takes the GPU so long, may begin then, and was launched by then."""
        self._computed_before = self.computed
        self.computed = max(max(begins, self.computed) + seconds, launched + KERNEL_SECONDS)
        return self.computed

    def look(self, metadata: StepMetadata, now: float) -> KVConnectorOutput:
        """Results of the ranks, as they see them now."""
        ended = {id for id, end in self._ends.items() if end <= now}
        self._done |= ended
        left = self._waiting.keys() - self._done - self._failed
        soon = set() if metadata.computes else {id for id in left if self._ends[id] - now < SOON_SECONDS}
        self._named |= soon
        self._now = now
        for id in sorted(self._waiting.keys() & (self._done | self._failed | soon)):
            self._reported.add(self._waiting.pop(id), failed=id in self._failed)
        received, failing = self._reported.take(more=metadata.computes and bool(self._waiting))
        for id in ended:
            del self._ends[id]
        rate = 1 / self._scale if self._scale else None
        done, failed = frozenset(self._done - self._failed), frozenset(self._failed)
        report = RankReport(0, done, failed, ready_blocks=self._host_blocks, load_bytes_per_second=rate)
        return KVConnectorOutput(
            finished_recving=received or None,
            failed_recving=failing,
            kv_connector_worker_meta=WorkerReports((report,), metadata.timed, prepared=(0,)),
        )

    def _end(self, transfer: TransferPlan, end: float) -> None:
        self._ends[transfer.id] = self._free[transfer.direction] = end


class Serving:
    """Users in a closed loop, `shares` of requests each. Time is `now`."""

    def __init__(
        self, shares: list[list[serve_trace.Request]], folder: Path, args: argparse.Namespace, kept: float
    ) -> None:
        sizes = vllm_simulated.Sizes(args.device_blocks, args.host_blocks)
        ours, model = (vllm_simulated.OURS, {"offload": args.offload, "policy": args.policy}), MODELS[args.model]
        self._engine = vllm_simulated.Engine(ours, folder, sizes, model=model)
        self._half = self._engine.scheduler.connector.scheduler
        self._half.clock = lambda: self.now
        self.machine = Machine(args.host_blocks, kept / (args.link * 1e9))
        self._users, self._block_tokens = [deque(share) for share in shares], args.block_tokens
        self._owners: dict[str, tuple[int, float]] = {}  # the user of a request, and when it came
        self._unanswered: set[str] = set()
        self.now = 0.0
        self.steps = self.prompt_tokens = 0
        self.first_tokens: list[float] = []
        for user in range(len(shares)):
            self._submit(user)

    def run(self) -> None:
        scheduler, under_way = self._engine.scheduler, deque[Any]()
        while self._owners:
            if len(under_way) < UNDER_WAY:
                under_way.append(self._launch(scheduler.schedule()))
                if len(under_way) < UNDER_WAY and under_way[-1][0].total_num_scheduled_tokens:
                    continue
            output, result, end = under_way.popleft()
            self.now = max(self.now, end) + UPDATE_SECONDS
            for outputs in scheduler.update_from_output(output, result).values():
                for each in outputs.outputs:
                    self._answered(each)

    @property
    def host_hit(self) -> float:
        return self._half.cache.statistics().hit_tokens / self.prompt_tokens

    def _launch(self, output: Any) -> tuple[Any, ModelRunnerOutput, float]:
        self.now += SCHEDULE_SECONDS
        metadata, tokens = output.kv_connector_metadata, output.total_num_scheduled_tokens
        may_compute = self.machine.begin(metadata, self.now)
        has_prompts = tokens > len(output.num_scheduled_tokens)
        begins = max(self.now + KERNEL_SECONDS, may_compute)
        if tokens:
            self.now += LAUNCH_PREFILL_SECONDS if has_prompts else LAUNCH_SECONDS
            seconds = PREFILL_SECONDS + TOKEN_SECONDS * tokens if has_prompts else DECODE_SECONDS
            end = self.machine.compute(seconds, begins, self.now)
        else:
            end = self.now = self.now + IDLE_SECONDS
        self.steps += tokens > 0
        ids = list(output.num_scheduled_tokens)
        sampled = [[] if self._engine.scheduler.requests[id].is_prefill_chunk else [7] for id in ids]
        result = ModelRunnerOutput(ids, {id: at for at, id in enumerate(ids)}, sampled)
        result.kv_connector_output = self.machine.look(metadata, self.now)
        return output, result, end

    def _answered(self, output: Any) -> None:
        user, came = self._owners[output.request_id]
        if output.new_token_ids and output.request_id in self._unanswered:
            self._unanswered.remove(output.request_id)
            self.first_tokens.append(self.now - came)
        if output.finished:
            del self._owners[output.request_id]
            self._submit(user)

    def _submit(self, user: int) -> None:
        if not self._users[user]:
            return
        request = self._users[user].popleft()
        tokens = tokens_of(request.pieces(self._block_tokens))["prompt_token_ids"]
        id = self._engine.submit(tokens, request.answer).request_id
        self._owners[id] = user, self.now
        self._unanswered.add(id)
        self.prompt_tokens += len(tokens)


def rows(args: argparse.Namespace) -> Iterator[str]:
    requests, _ = serve_trace.read(args.trace, args.block_tokens, args.max_answer, vllm_simulated.MAX_MODEL_LEN)
    shares = serve_trace.dealt(requests, args.users, args.requests)
    yield "| connector | prompt tokens/s | host hit | first token, ms: mean, 50 % | steps that compute | a load, ms |"
    yield "| --- | --: | --: | --: | --: | --: |"
    with vllm_simulated.model_folder() as folder:
        for name in args.connectors:
            serving = Serving(shares, folder, args, kept=0.0 if name == "null" else args.kept)
            serving.run()
            first, loads = serving.first_tokens, serving.machine.latencies
            yield (
                f"| {name} | {serving.prompt_tokens / serving.now:,.0f} | {serving.host_hit:.3f} | "
                f"{1e3 * fmean(first):,.0f}, {1e3 * median(first):,.0f} | {serving.steps} | "
                f"{1e3 * fmean(loads or [0]):.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--connectors", nargs="+", choices=["ours", "null"], default=["null", "ours"])
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--offload", choices=["lazy", "eager"], default="lazy")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--max-answer", type=int, default=48)
    parser.add_argument("--device-blocks", type=int, default=8192)
    parser.add_argument("--host-blocks", type=int, default=20_480)
    parser.add_argument("--kept", type=float, default=1.0)
    parser.add_argument("--link", type=float, default=LINK_GB_PER_SECOND)
    args = parser.parse_args()
    vllm_simulated.Scheduler = AsyncScheduler
    for row in rows(args):
        print(row, flush=True)


if __name__ == "__main__":
    main()
