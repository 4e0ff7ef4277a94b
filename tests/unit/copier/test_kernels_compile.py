"""Every kernel compiles for every GPU that is supported, without one, and copies as wide as its alignment allows.

COMPILE_ALL=1 compiles all 210 kernels; without it, those of the narrowest and the widest alignment for the widest tile.
"""

import json
import os
import subprocess
import sys

import pytest

from cpu_prefix_cache.copier.triton_staging import WORDS, tiling_for

TARGETS = {  # by backend: architectures, and the threads that run in step
    "cuda": {"80": 32, "90": 32, "100": 32, "120": 32},
    "hip": {"gfx942": 64, "gfx950": 64, "gfx1201": 32},
}
ALL = os.environ.get("COMPILE_ALL") == "1"
WIDTHS = tiling_for(32).widths
CHOSEN = (list(WORDS), WIDTHS) if ALL else ([min(WORDS), max(WORDS)], [max(WIDTHS)])


def compiled(backend, cache):
    """Output of compile_kernels.py by architecture, from a process of its own: this one has Triton's interpreter."""
    targets = [f"{backend}:{arch}:{wave}" for arch, wave in TARGETS[backend].items()]
    chosen = (",".join(map(str, some)) for some in (targets, *CHOSEN))
    program = [sys.executable, "-m", "tests.unit.copier.compile_kernels", *chosen]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    return {arch: [kernel for kernel in kernels if kernel["arch"] == arch] for arch in TARGETS[backend]}


def copies_at(alignment, kernel):
    """Whether a kernel stores `alignment` bytes at a time and no others, a thread as many times as on every GPU, and
    loads what it stores. (It also loads ids and the table, 8 bytes at a time.)"""
    word_bytes = WORDS[alignment][1]
    times = tiling_for(32).words * word_bytes // 256 // alignment
    loads = {int(width): count for width, count in kernel["load"].items()}
    return (
        kernel["store"] == {str(alignment): times}
        and set(loads) == {alignment, 8}
        and (alignment == 8 or loads[alignment] == times)
    )


@pytest.mark.parametrize("backend", TARGETS)
def test_every_kernel_compiles_and_copies_as_much_at_a_time_as_it_may(backend, tmp_path):
    for of_arch in compiled(backend, tmp_path).values():
        coding, kernels = [], []
        for kernel in of_arch:
            (coding if "codes" in kernel else kernels).append(kernel)
        assert [kernel["codes"] for kernel in coding] == ["store", "load"]
        for kernel in coding:
            assert kernel["binary"] > 1000
            assert "4" in kernel["load"] and "4" in kernel["store"], kernel  # words of two values
        assert len(kernels) == 2 * len(CHOSEN[0]) * len(CHOSEN[1])
        for kernel in kernels:
            assert kernel["binary"] > 1000
            assert copies_at(kernel["alignment"], kernel), kernel
        narrow = [kernel for kernel in kernels if kernel["alignment"] < 16]
        assert narrow and not any(copies_at(16, kernel) for kernel in narrow)  # the control
