"""Checks of devices and stores that others write for this library, for their authors to run."""

from cpu_prefix_cache.testing.device import Trial, check_device
from cpu_prefix_cache.testing.store import check_store

__all__ = ["Trial", "check_device", "check_store"]
