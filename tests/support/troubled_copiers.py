"""Copiers that are late, fail or damage what they load, for the stories of all engines."""

from cpu_prefix_cache.testing import CorruptingCopier, FailingCopier, LateCopier

COPIERS = {
    "as it is": lambda copier, tensors: copier,
    "fails": FailingCopier,
    "late": LateCopier,
    "corrupts": lambda copier, tensors: CorruptingCopier(copier, tensors, loads=None, blocks=slice(None)),
}
