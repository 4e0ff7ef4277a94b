"""GroupCopies: host blocks paired with device blocks, group by group, for whoever knows which blocks they are."""

from collections.abc import Iterable, Sequence
from itertools import islice

from cpu_prefix_cache.messages.plan import GroupCopy
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.planner import HybridChunkPlanner

Blocks = Sequence[int]


class GroupCopies:
    """The copies of one model's chunks and checkpoints. It knows no pool."""

    def __init__(self, planner: HybridChunkPlanner) -> None:
        self.planner = planner
        self._in_chunk = [at for at, piece in enumerate(planner.pieces) if piece.in_chunk]

    def checkpoint_at(self, keys: Sequence[bytes], depth: int) -> CheckpointAt:
        """The checkpoint below `depth` chunks, one or more, of the request with these keys."""
        return CheckpointAt(depth, tuple(keys[depth - self.planner.reach(depth) : depth]))

    def of_chunks(self, host_blocks: Blocks, device_blocks: Sequence[Blocks]) -> list[GroupCopy]:
        """Pair the host blocks of chunks, chunk after chunk, with their device blocks, given for each group that chunks
        have.
        """
        pieces = [self.planner.pieces[at] for at in self._in_chunk]
        by_group = _by_group(host_blocks, [piece.host_blocks for piece in pieces])
        return [
            GroupCopy(group, tuple(host), tuple(device))
            for group, host, device in zip(self._in_chunk, by_group, device_blocks, strict=True)
        ]

    def checkpoint_copies(
        self, depth: int, host_blocks: Sequence[Blocks | None], device_blocks: Sequence[Blocks | None]
    ) -> list[GroupCopy]:
        """Pair the pieces of the checkpoint below `depth` chunks, in their order; None on either side is not copied."""
        copies: dict[int, tuple[list[int], list[int]]] = {}
        for at, host, device in zip(self.planner.checkpoint(depth), host_blocks, device_blocks, strict=True):
            if host is not None and device is not None:
                both = copies.setdefault(at.group, ([], []))
                both[0].extend(host)
                both[1].extend(device)
        return [GroupCopy(group, tuple(host), tuple(device)) for group, (host, device) in copies.items()]

    def of_load(
        self, chunks: Blocks, pieces: Sequence[Blocks] | None, start: int, stop: int, destinations: Sequence[Blocks]
    ) -> list[GroupCopy]:
        """Fill `destinations`, device blocks for each group, from the host blocks of chunks [start, stop), and of the
        pieces of the checkpoint that resuming after them takes, if it takes one. Of these what lies before chunk
        `start` is not copied (rule 8).
        """
        copies = self.of_chunks(chunks, [destinations[at] for at in self._in_chunk])
        if pieces is None:
            return copies
        rest, depth = [iter(blocks) for blocks in destinations], self.planner.chunks_to_resume(stop)
        device = [
            tuple(islice(rest[at.group], self.planner.pieces[at.group].device_blocks)) if at.chunk >= start else None
            for at in self.planner.checkpoint(depth)
        ]
        return copies + self.checkpoint_copies(depth, pieces, device)

    def chunk_blocks_by_group(self, device_blocks: Blocks) -> list[Blocks]:
        """Split device blocks given chunk by chunk, as `Device.find` gives them, into a list for each group."""
        return _by_group(device_blocks, [self.planner.pieces[at].device_blocks for at in self._in_chunk])


def num_bytes(planner: HybridChunkPlanner, copies: Iterable[GroupCopy]) -> int:
    """Bytes that copies carry over the link, without padding."""
    return sum(len(copy.device_blocks) * planner.crossing_bytes[copy.group] for copy in copies)


def _by_group(blocks: Blocks, widths: Sequence[int]) -> list[Blocks]:
    """Split a list of chunks, each `widths` blocks for one group after another, into a list for each group."""
    if len(widths) == 1:
        return [blocks]
    groups: list[Blocks] = []
    chunk, begin = sum(widths), 0
    for width in widths:
        groups.append([block for at in range(begin, len(blocks), chunk) for block in blocks[at : at + width]])
        begin += width
    return groups
