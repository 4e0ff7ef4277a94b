"""Compiles the copier's kernels for a GPU that is not here. Run by test_kernels_compile.py:
compile_kernels.py BACKEND ARCH WAVE ALIGNMENTS WIDTHS, the last two separated by commas.

The kernels are those that the launchers request from Triton, with the arguments they give; only the GPU is made up. For
each a line of JSON is printed: which one it is, the bytes of its binary, and how many loads and stores it has of each
width.
"""

import json
import re
import sys
from collections import Counter
from functools import partial

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
    """As much of Triton's driver as compiling needs."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiling:
    """In place of the kernel: what is to be launched is compiled."""

    def __init__(self, kernel: triton.JITFunction) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> partial:
        return partial(self._kernel.warmup, grid=grid)


def main(backend: str, arch: str, wave: str, alignments: str, widths: str) -> None:
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(wave))
    text, binary = {"cuda": ("ptx", "cubin"), "hip": ("amdgcn", "hsaco")}[backend]
    triton.runtime.driver.set_active(MadeUp(target))
    triton_staging._copy = Compiling(triton_staging._copy)
    triton_coding._encode, triton_coding._decode = map(Compiling, (triton_coding._encode, triton_coding._decode))
    table = torch.zeros(4, 1, dtype=torch.int64)
    for direction, kernel in CodingLauncher(table, 16384, 1, 1)._compiled.items():
        row = dict(codes=direction.value, binary=len(kernel.asm[binary]), **accesses(kernel.asm[text]))
        print(json.dumps(row), flush=True)
    for alignment in map(int, alignments.split(",")):
        for width in map(int, widths.split(",")):
            launcher = Launcher(table, alignment, width, 1, tiling_for(target.warp_size))
            for gathers, kernel in launcher._compiled.items():
                found = accesses(kernel.asm[text])
                which = dict(alignment=alignment, width=width, gathers=gathers, binary=len(kernel.asm[binary]))
                print(json.dumps({**which, **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
