"""Copiers that are late, fail or damage what they load, for the stories of all engines."""

from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.testing import CorruptingCopier, FailingCopier, LateCopier, MeddlingCopier

COPIERS = {
    "as it is": lambda copier, tensors: copier,
    "fails": FailingCopier,
    "late": LateCopier,
    "corrupts": lambda copier, tensors: CorruptingCopier(copier, tensors, loads=None, blocks=slice(None)),
}


class FailingLoads(MeddlingCopier):
    """The first `times` loads, or all, leave wrong bytes in all blocks that they fill, and raise."""

    def __init__(self, copier, tensors, times=None):
        super().__init__(copier)
        self.tensors, self.times, self.failed = tensors, times, 0

    def copy(self, direction, copies):
        if direction is Direction.STORE or self.failed == self.times:
            return super().copy(direction, copies)
        self.failed += 1
        for group in range(len(self.tensors)):
            CorruptingCopier(self.copier, self.tensors, group, loads=None, blocks=slice(None)).copy(direction, copies)
        raise OSError("this load fails when its bytes are damaged")
