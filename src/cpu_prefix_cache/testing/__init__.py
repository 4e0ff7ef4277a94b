"""What this library demands of what others write for it, as checks that their authors run: a device, a store."""

from cpu_prefix_cache.testing.device import Trial, check_device
from cpu_prefix_cache.testing.store import check_store

__all__ = ["Trial", "check_device", "check_store"]
