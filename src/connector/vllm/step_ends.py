"""Where vLLM is to end the steps of a prompt, so that there are states to be kept.

By itself it ends them at the last block of states of a prompt, and at one more place, where the prompt departs from
what its device has (`Request.shared_prefix_boundary`). There it keeps windows and states. That place is named here:
where the prompt departs from what the host has, or, in each step anew, the next of several.

    tokens        0           2048        4096    5120  5500
    vLLM          |-----------------------------------|-----|      blocks of states of 1,024 tokens
    kept, too     |-----------|-----------|-----------|-----|      with a checkpoint every 2,048
                  |-----------------------|-----------|-----|      where chunks have 4,096 (context parallelism of 4)

No step has to end for a window. But it must be named before the first step that computes it, and beside a drafter until
after the last: a model with windows has one place alone.
"""

from connector.vllm.requests import Known
from cpu_prefix_cache.deciding import CPUPrefixCache, HybridChunkPlanner, KeptCache, Request


class StepEnds:
    """Where vLLM's hashes are as long as chunks it keeps a state at the last boundary of a prompt by itself: without an
    interval there is nothing more to name than the departure.
    """

    def __init__(self, planner: HybridChunkPlanner, hashes_per_chunk: int, checkpoint_interval: int | None) -> None:
        is_finer = hashes_per_chunk > 1 or checkpoint_interval is not None
        self._names_all = is_finer and planner.has_states_alone
        self._computing: dict[str, Known] = {}  # those with ends that no step has reached

    def looked_up(self, known: Known, cache: CPUPrefixCache | KeptCache, ours: Request, resumed: int) -> None:
        """A request would resume at this token."""
        branch = cache.branch(ours, resumed) or 0
        known.ends = [max(known.request.shared_prefix_boundary, branch)]
        if self._names_all and ours.stores:
            known.ends = sorted({*known.ends, *cache.boundaries_of(ours, resumed)})
        self._name(known, resumed)

    def admitted(self, known: Known) -> None:
        if self._names_all:
            self._computing[known.request.request_id] = known

    def scheduled(self, num_scheduled_tokens: dict[str, int]) -> None:
        """A step computes so many tokens of each request: the next one is to end where they have not come yet."""
        for id, known in list(self._computing.items()):
            reached = known.request.num_computed_tokens + num_scheduled_tokens.get(id, 0)
            if not self._name(known, reached):
                del self._computing[id]

    def left(self, id: str) -> None:
        """A request has no device blocks any more."""
        self._computing.pop(id, None)

    def _name(self, known: Known, reached: int) -> bool:
        """Whether there is one beyond these tokens."""
        end = next((end for end in known.ends if end > reached), None)
        if end is not None:
            known.request.shared_prefix_boundary = end
        return end is not None
