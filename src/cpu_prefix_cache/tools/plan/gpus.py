"""Assumptions about a GPU where nothing was measured: options that were given come first."""

import argparse
from dataclasses import dataclass

from cpu_prefix_cache.messages.errors import ConfigurationError

REACHED = 0.63  # of the TFLOPS that a datasheet promises: vLLM's prefill on an H200 (docs/policies.md)
KV_SHARE = 0.5  # of its memory: weights and activations take the rest
PCIE_4, PCIE_5 = 25.0, 54.0  # GB/s of large copies


@dataclass(frozen=True, slots=True)
class Gpu:
    """The numbers of a datasheet: TFLOPS of dense bf16, GB of memory; and GB/s of its link to the host."""

    tflops: float
    memory: float
    link: float


GPUS = {
    "a100": Gpu(312, 80, PCIE_4),
    "b200": Gpu(2250, 180, PCIE_5),
    "h100": Gpu(989, 80, PCIE_5),
    "h200": Gpu(989, 141, PCIE_5),
    "l40s": Gpu(362, 48, PCIE_4),
}


def with_gpu(args: argparse.Namespace) -> tuple[argparse.Namespace, str]:
    """The options with what follows from --gpu for those that were left out, and a sentence about it."""
    if args.gpu is None:
        return args, ""
    if args.gpu not in GPUS:
        raise ConfigurationError(
            f"unknown GPU {args.gpu!r}; known are {', '.join(GPUS)}; of another one give --tflops, --host-rate and "
            "--device-capacity"
        )
    gpu, ranks = GPUS[args.gpu], args.tp or 1
    assumed: dict[str, tuple[str, str]] = {}
    if args.prefill_rate is None and args.tflops is None:
        promised = gpu.tflops * ranks
        assumed["tflops"] = f"{promised * REACHED:.0f}", f"{REACHED:.0%} of {promised:,.0f} TFLOPS"
    if args.host_rate is None:
        assumed["host_rate"] = f"{gpu.link * ranks:g}", f"loads at {gpu.link * ranks:g} GB/s"
    if args.device_capacity is None:
        kept = gpu.memory * ranks * KV_SHARE
        assumed["device_capacity"] = f"{kept:g}GB", f"{kept:g} GB of KV on the device, {KV_SHARE:.0%} of its memory"
    filled = argparse.Namespace(**{**vars(args), **{name: value for name, (value, _) in assumed.items()}})
    options = ", ".join(f"--{name.replace('_', '-')}" for name in assumed)
    reasons = ", ".join(reason for _, reason in assumed.values())
    return filled, f"assumed of {ranks} x {args.gpu}: {reasons}; {options} say otherwise" if assumed else ""
