"""Depths at which a prompt is worth a checkpoint to resume from: how far later prompts will find its chunks (rule 9).

    last      the same prompt again
    whole     one that continues it
    branch    one that departs where this one departs from what somebody had before

With an interval also every so many tokens.
"""

from cpu_prefix_cache.model.planner import HybridChunkPlanner


def wanted_depths(
    planner: HybridChunkPlanner, chunks: int, end: int, num_tokens: int, branch: int, interval: int | None = None
) -> list[int]:
    """The depths, in chunks, beyond token `end` and within a prompt of `num_tokens` tokens, of which so many `chunks`
    have keys. Ascending.
    """
    last = min(planner.hittable_chunks(num_tokens), chunks)
    whole = min(planner.full_chunks(num_tokens), chunks)
    wanted = {last, whole, branch}
    if interval is not None:
        wanted.update(map(planner.chunks_to_resume, range(0, last + 1, interval // planner.grid_tokens)))
    return [depth for depth in sorted(wanted) if is_worth(planner, depth, end, num_tokens)]


def is_worth(planner: HybridChunkPlanner, depth: int, end: int, num_tokens: int) -> bool:
    """Whether a checkpoint at that depth lets a request resume beyond token `end` and within its prompt."""
    resumed = planner.resumable_chunks(depth) * planner.grid_tokens
    return end < resumed < num_tokens and planner.needs_checkpoint(depth)
