"""HostCache: both halves of the host cache for an engine in one process.

A request, as the engine's scheduler sees it:

    start   ->  Miss       compute from n0: the host has nothing more
            ->  Pending    start again later: its prefix is being loaded for another request
            ->  Hit        park it: end_step names it when the load has ended, and from which token on to compute
    end                    before its blocks are freed: finished, preempted or aborted, running or loading

and a step of the engine:

    begin_step             before compute: copies begin, in the order of what compute was given before
    end_step(computed)     after compute: which loads have ended
    drain                  in its place, where nothing is computed: waits for the copies that have begun

The host region is pinned from the first step on, while the engine works; or before it, by `prepare`.

With a tier below (`FileTier`, `SharedTier`), `start` also answers Pending while a prefix is read from it into host
memory.
"""

from collections.abc import Hashable

from cpu_prefix_cache.host_cache.halves import Computed, Halves


class HostCache(Halves):
    """A host prefix cache behind `device`, for KV laid out as in `groups`.

    Prefixes are found at multiples of a chunk, the tokens of a key: of as many as the device's `blocks_per_chunk` have,
    or else the least common multiple of the groups' `block_tokens`.

    `host_bytes` is the size of the host region, `max_model_len` the tokens of the longest request, `max_step_tokens`
    the most tokens whose device blocks one engine step can allocate. `options` are choices that have defaults.

    `below` is a tier for what host memory cannot hold, of files or of a store that machines share (docs/tiers.md); then
    keys are sha256 digests.

    With `pool`, a NodePool, all engines of the node share one pool, which a keeper has (docs/keeper.md): there is no
    `host_bytes`, and `options.offload` is "eager". The first `start` of a request is then answered Pending, for a step.

    All calls are made in one process, and raise MisuseError in a fork, and after `close`; a `with` closes it.

    Raises ConfigurationError when the parts do not fit together or the machine does not have the memory.
    """

    def end_step(self, computed: Computed) -> list[tuple[Hashable, int]]:
        """A step has ended, after which each request of `computed` has KV of so many tokens. Read only when needed, and
        with `strict` always.

        The requests whose loads have ended, each with the token from which on it computes: the boundary, or
        what was on the device when it was started if the load has failed.
        """
        return self._end_step(computed)

    def end(self, id: Hashable, num_tokens: int, *, preempted: bool = False) -> None:
        """A request finished, was aborted or preempted, with `num_tokens` tokens computed. It still has its blocks.

        It may be loading. A preempted request may be started again at once.
        """
        self._end(id, num_tokens, preempted)
