"""A staged copier of tensors in host memory that takes them for a device's: it has a simulated driver."""

from dataclasses import replace
from functools import partial
from unittest import mock

from cpu_prefix_cache.copier import staged
from cpu_prefix_cache.copier.binding import Binding
from cpu_prefix_cache.copier.triton_staging import TILING
from cpu_prefix_cache.memory.moves import SEAM_BYTES


def simulated_copier(
    driver,
    shapes,
    tensors,
    host,
    *,
    null_block=None,
    pinned=None,
    seam_bytes=SEAM_BYTES,
    tiling=TILING,
    **options,
):
    """Unless an arena is `pinned`, `host` is, as an arena would be, slice by slice. The thread has no device, so that a
    copier that does not see to it is noticed."""
    streams = replace(driver.streams.streams, driver=driver)
    with driver.working_in(0), mock.patch.object(staged, "tiling_on", return_value=tiling):
        for first in range(0, host.numel() if pinned is None else 0, seam_bytes):
            driver.register(host.data_ptr() + first, min(seam_bytes, host.numel() - first))
        options |= dict(streams=streams, pinned=pinned, seam_bytes=seam_bytes)
        copier = staged.StagedCopier(Binding(shapes, tensors, host, null_block), **options)
    copier._working = partial(driver.working_in, 0)  # the number of the device; a tensor in host memory has none
    return copier
