"""Copiers that are late, fail or damage what they load, for the stories of all engines."""

import random

from tests.faults import CorruptingCopier, MeddlingCopier


class FailingCopier(MeddlingCopier):
    """Every fifth copy raises, some before and some after its bytes have moved."""

    def __init__(self, copier):
        super().__init__(copier)
        self.draw = random.Random(5)

    def copy(self, direction, copies):
        fails, first = self.draw.random() < 0.2, self.draw.random() < 0.5
        if fails and first:
            raise RuntimeError("this copy fails before it begins")
        super().copy(direction, copies)
        if fails:
            raise RuntimeError("this copy fails when it has ended")


class LateCopier(MeddlingCopier):
    """A copy begins when its end has been queried three times, or waited for."""

    def __init__(self, copier):
        super().__init__(copier)
        self.waiting = []

    def submit(self, direction, copies, after):
        late = _Late(self, direction, copies)
        self.waiting.append(late)
        return late

    def run_until(self, last):
        while last in self.waiting:
            late = self.waiting.pop(0)
            self.copy(late.direction, late.copies)


class _Late:
    def __init__(self, copier, direction, copies):
        self.copier = copier
        self.direction = direction
        self.copies = copies
        self.asked = 0

    def passed(self):
        self.asked += 1
        if self.asked > 3:
            self.until_passed()
        return self not in self.copier.waiting

    def until_passed(self):
        self.copier.run_until(self)


COPIERS = {
    "as it is": lambda copier, tensors: copier,
    "fails": lambda copier, tensors: FailingCopier(copier),
    "late": lambda copier, tensors: LateCopier(copier),
    "corrupts": lambda copier, tensors: CorruptingCopier(copier, tensors, group=0, loads=None, blocks=slice(None)),
}
