"""The part of a step's plan that one rank copies. The plan itself is the same for all ranks.

groups   A pipeline stage has some of the model's groups, and numbers them from 0. Copies of other groups are left out.
pieces   Ranks that hold the same bytes share one host region. Each piece of a store is written by one of them, chosen
         by its position in the region, so that all links carry an equal share, unless pieces of other groups lie
         between. Each of them reads all pieces of a load.
lanes    Where not all ranks have the same, a host block is a row of lanes. What is the same on all ranks takes whole
         rows; a KV head that some adjacent ranks have, theirs; and of the rest each rank its lane.

                       lane 0   lane 1   lane 2   lane 3
            block 0  [ latent of chunk 0                 ]    to a copier these are blocks 0, 1, 2 and 3
            block 1  [ head 0         ][ head 1          ]    4, 5, 6 and 7
            block 2  [ state ][ state ][ state ][ state  ]    8, 9, 10 and 11

If nothing of a transfer is left, this rank copies nothing and reports it as done at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cpu_prefix_cache.deciding import Direction, GroupCopy, Piece, RankReport, StepPlan, TransferPlan


@dataclass(frozen=True, slots=True)
class Share:
    """The share of rank `rank` among the `ranks` that share its region (0 of 1 if it has its own).

    `pieces` are those of this rank's groups, and `groups` their indices among the `num_groups` groups of the plan. Its
    copier has each of the `lanes` of a host block as a block.
    """

    pieces: Sequence[Piece]
    groups: Sequence[int]
    num_groups: int
    rank: int = 0
    ranks: int = 1
    lanes: int = 1

    @property
    def is_everything(self) -> bool:
        return self.ranks == 1 and len(self.groups) == self.num_groups

    def of_plan(self, plan: StepPlan) -> StepPlan:
        if self.is_everything or not plan.transfers:
            return plan
        return plan._replace(transfers=tuple(map(self.of_transfer, plan.transfers)))

    def of_transfer(self, transfer: TransferPlan) -> TransferPlan:
        """The transfer with this rank's group numbers, copies and bytes, and its copier's host blocks."""
        mine = {group: at for at, group in enumerate(self.groups)}
        copies = [copy._replace(group=mine[copy.group]) for copy in transfer.copies if copy.group in mine]
        if transfer.direction is Direction.STORE and self.ranks > 1:
            copies = [dealt for copy in copies if (dealt := self._dealt(copy)).host_blocks]
        carried = sum(_num_bytes(copy, self.pieces[copy.group]) for copy in copies)
        return transfer._replace(copies=tuple(map(self._by_lane, copies)), num_bytes=carried)

    def of_report(self, report: RankReport) -> RankReport:
        """The report with the plan's host blocks."""
        unfit = ((id, tuple(block // self.lanes for block in blocks)) for id, blocks in report.unfit)
        return report._replace(unfit=tuple(unfit)) if report.unfit else report

    def _dealt(self, copy: GroupCopy) -> GroupCopy:
        piece = self.pieces[copy.group]
        holders = self.ranks // piece.lanes  # of the same bytes
        return copy if holders == 1 else written_by(copy, piece, self.rank % holders, holders)

    def _by_lane(self, copy: GroupCopy) -> GroupCopy:
        parts = self.pieces[copy.group].lanes
        part, width = self.rank * parts // self.ranks, self.lanes // parts
        lanes = range(part * width, (part + 1) * width)
        return copy._replace(host_blocks=tuple(block * self.lanes + at for block in copy.host_blocks for at in lanes))


def written_by(copy: GroupCopy, piece: Piece, rank: int, ranks: int) -> GroupCopy:
    """The part of `copy` that rank `rank` of `ranks` with the same bytes writes.

    >>> from cpu_prefix_cache.model.groups import PrefixGroup
    >>> group = PrefixGroup(name="mla", block_tokens=16, block_bytes=100, lanes=1)
    >>> written_by(GroupCopy(0, (4, 5, 6, 9), (1, 2, 3, 7)), Piece(group, 1, 1, 100), rank=1, ranks=2)
    GroupCopy(group=0, host_blocks=(5, 9), device_blocks=(2, 7), labels=())
    """
    here, there = piece.host_blocks, piece.device_blocks
    mine = [at for at, block in enumerate(copy.host_blocks[::here]) if block // here % ranks == rank]
    return GroupCopy(
        copy.group,
        tuple(block for at in mine for block in copy.host_blocks[at * here : (at + 1) * here]),
        tuple(block for at in mine for block in copy.device_blocks[at * there : (at + 1) * there]),
    )


def _num_bytes(copy: GroupCopy, piece: Piece) -> int:
    return len(copy.host_blocks) // piece.host_blocks * piece.num_bytes
