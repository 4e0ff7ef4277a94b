"""Compiles the copier's kernels for GPUs that are not here. Run by test_kernels_compile.py:
compile_kernels.py TARGETS ALIGNMENTS WIDTHS, each separated by commas; a target is backend:architecture:wave.

The kernels are those that the launchers request from Triton, with the arguments they give; only the GPU is made up. For
each a line of JSON is printed: which one it is and for what architecture, the bytes of its binary, and how many loads
and stores it has of each width.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from cpu_prefix_cache.copier import triton_coding, triton_staging
from cpu_prefix_cache.copier.triton_coding import CodingLauncher
from cpu_prefix_cache.copier.triton_staging import Launcher, tiling_for

# NVIDIA: ld.global.v2.b64, st.global.b8. AMD: global_load_dwordx4, global_store_b128, global_load_ubyte.
ACCESS = re.compile(r"\b(?:(ld|st)\.global|(?:global|buffer|flat)_(load|store))[._](\S+)")
AMD_BYTES = {"byte": 1, "ubyte": 1, "sbyte": 1, "short": 2, "ushort": 2, "sshort": 2, "dword": 4}


def accesses(assembly: str) -> dict[str, dict[int, int]]:
    """How many loads and stores of device memory there are, by their bytes.

    >>> accesses("@%p1 ld.global.v2.b64 { %rd1, %rd2 }, [ %rd3 + 0 ]; ld.shared.b32 %r1, [ %r2 ];")
    {'load': {16: 1}, 'store': {}}
    >>> accesses("global_store_dwordx2 v[0:1], v[2:3], off")
    {'load': {}, 'store': {8: 1}}
    """
    forms: dict[str, list[int]] = {"load": [], "store": []}
    for nvidia, amd, form in ACCESS.findall(assembly):
        forms[amd or {"ld": "load", "st": "store"}[nvidia]].append(bytes_of(form))
    return {access: dict(Counter(widths)) for access, widths in forms.items()}


def bytes_of(form: str) -> int:
    """Bytes of one access, by the suffix of its name.

    >>> [bytes_of(form) for form in ("v2.b64", "v4.b32", "b8", "dwordx4", "dwordx2", "dword", "ubyte", "b128", "u8")]
    [16, 16, 1, 16, 8, 4, 1, 16, 1]
    """
    if words := re.search(r"dwordx(\d)", form):
        return 4 * int(words[1])
    if form in AMD_BYTES:
        return AMD_BYTES[form]
    times, bits = re.search(r"v(\d)\.", form), re.search(r"[bui](\d+)$", form)
    if bits is None:
        raise ValueError(f"an access of a form that is not known: {form}")
    return int(bits[1]) // 8 * int(times[1] if times else 1)


class MadeUp:
    """As much of Triton's driver as compiling needs. Each target is a device: Triton keeps kernels by its number."""

    def __init__(self, device: int, target: GPUTarget) -> None:
        self._device, self._target = device, target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiling:
    """In place of the kernel: what is to be launched is compiled."""

    def __init__(self, kernel: triton.JITFunction) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> partial:
        return partial(self._kernel.warmup, grid=grid)


def main(targets: str, alignments: str, widths: str) -> None:
    triton_staging._copy = Compiling(triton_staging._copy)
    triton_coding._encode, triton_coding._decode = map(Compiling, (triton_coding._encode, triton_coding._decode))
    for device, target in enumerate(targets.split(",")):
        backend, arch, wave = target.split(":")
        triton.runtime.driver.set_active(
            MadeUp(device, GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(wave)))
        )
        for which, kernel in compiled(int(wave), alignments, widths):
            text, binary = {"cuda": ("ptx", "cubin"), "hip": ("amdgcn", "hsaco")}[backend]
            sizes = dict(binary=len(kernel.asm[binary]), **accesses(kernel.asm[text]))
            print(json.dumps({"arch": str(kernel.metadata.target.arch), **which, **sizes}), flush=True)


def compiled(wave: int, alignments: str, widths: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Which kernel it is, and what Triton has compiled."""
    table = torch.zeros(4, 1, dtype=torch.int64)
    for direction, kernel in CodingLauncher(table, 16384, 1, 1)._compiled.items():
        yield dict(codes=direction.value), kernel
    for alignment in map(int, alignments.split(",")):
        for width in map(int, widths.split(",")):
            launcher = Launcher(table, alignment, width, 1, tiling_for(wave))
            for gathers, kernel in launcher._compiled.items():
                yield dict(alignment=alignment, width=width, gathers=gathers), kernel


if __name__ == "__main__":
    main(*sys.argv[1:])
