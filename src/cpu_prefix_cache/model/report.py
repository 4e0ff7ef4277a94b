"""Results of a planner's arithmetic, in bytes and in sentences. Nothing here is called while requests are served."""

from collections.abc import Iterable

from cpu_prefix_cache.model.planner import FAR_CHUNKS, HybridChunkPlanner

HIGH_WASTE = 0.25  # share of empty bytes above which `advice` proposes a change


def group_waste(planner: HybridChunkPlanner, group: int) -> float:
    """The share of the host bytes of one group's pieces that is empty."""
    return 1 - planner.piece_bytes(group) / planner.held_bytes(group)


def conversation_bytes(planner: HybridChunkPlanner, num_tokens: int, depths: Iterable[int] | None = None) -> int:
    """Host memory on all ranks for a conversation with a checkpoint below each of `depths` chunks.

    Without `depths`, below its last full chunk. A piece that several checkpoints need counts once.
    """
    last = planner.full_chunks(num_tokens)
    kept = {at for depth in ([last] if depths is None else depths) for at in planner.checkpoint(depth)}
    blocks = last * planner.host_blocks_per_chunk + sum(planner.pieces[at.group].host_blocks for at in kept)
    return blocks * planner.host_block_bytes


def everything_bytes(planner: HybridChunkPlanner, num_tokens: int) -> int:
    """The same when every block of every group is kept, as if all were full attention. Never less."""
    per_chunk = [1 if piece.in_chunk else planner.grid_tokens // piece.group.block_tokens for piece in planner.pieces]
    held = sum(planner.held_bytes(at) * count for at, count in enumerate(per_chunk))
    return planner.full_chunks(num_tokens) * held


def advice(planner: HybridChunkPlanner) -> list[str]:
    """A sentence for each group that wastes more than a quarter of its host blocks: what to change."""
    return [
        f"group {group.name!r} leaves {group_waste(planner, at):.0%} of its host blocks empty: its pieces of "
        f"{planner.pieces[at].num_bytes:,} bytes take {planner.pieces[at].host_blocks} host blocks of "
        f"{_room(planner, at) // planner.pieces[at].host_blocks:,}; {_fitting_tokens(planner, at)}"
        for at, group in enumerate(planner.groups)
        if group_waste(planner, at) > HIGH_WASTE
    ]


def describe(planner: HybridChunkPlanner) -> str:
    """A table: what every group keeps, and how much of its host memory is empty.

    >>> from cpu_prefix_cache.model.groups import PrefixGroup, StateGroup, WindowGroup
    >>> planner = HybridChunkPlanner(
    ...     [
    ...         PrefixGroup(name="full", block_tokens=16, block_bytes=8_192),
    ...         WindowGroup(name="window", block_tokens=8, block_bytes=4_096, window_tokens=20),
    ...         StateGroup(name="state", block_tokens=16, block_bytes=12_288),
    ...     ],
    ...     max_model_len=1_024,
    ... )
    >>> print(describe(planner))
    grid 16 tokens; host blocks of 4,096 bytes; waste 0.0%
    group            kind          piece bytes host blocks            pieces  waste
    full             prefix              8,192           2         1 a chunk   0.0%
    window           window              4,096           1    3 a checkpoint   0.0%
    state            state              12,288           3    1 a checkpoint   0.0%
    """
    ranks = f" on each of {planner.ranks} ranks" if planner.ranks > 1 else ""
    lines = [
        f"grid {planner.grid_tokens} tokens; host blocks of {planner.lane_bytes:,} bytes{ranks}; "
        f"waste {planner.waste:.1%}",
        f"{'group':<16} {'kind':<12} {'piece bytes':>12} {'host blocks':>11} {'pieces':>17} {'waste':>6}",
    ]
    far = planner.checkpoint(planner.chunks_to_resume(FAR_CHUNKS))
    for at, (group, piece) in enumerate(zip(planner.groups, planner.pieces, strict=True)):
        kept = "1 a chunk" if piece.in_chunk else f"{sum(p.group == at for p in far)} a checkpoint"
        lines.append(
            f"{group.name:<16} {group.kind:<12} {piece.num_bytes:>12,} {piece.host_blocks:>11} {kept:>17} "
            f"{group_waste(planner, at):>6.1%}"
        )
    return "\n".join([*lines, *advice(planner)])


def _fitting_tokens(planner: HybridChunkPlanner, at: int) -> str:
    group, piece = planner.groups[at], planner.pieces[at]
    if group.is_state:
        return "a page is one value and cannot be split, so only another host block size would fit it better"
    if piece.in_chunk:
        return f"a grid of about {_room(planner, at) * planner.grid_tokens // piece.num_bytes} tokens would fill them"
    return f"blocks of about {_room(planner, at) * group.block_tokens // piece.num_bytes} tokens would fill them"


def _room(planner: HybridChunkPlanner, at: int) -> int:
    """How many bytes the host blocks of a piece have for it: in one lane, or in all of them."""
    return planner.held_bytes(at) // planner.pieces[at].lanes
