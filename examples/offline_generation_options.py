"""The options of the example, checked before anything is loaded."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from builtin_models import ARCHITECTURES
from cpu_prefix_cache import OFFLOAD_MODES, POLICIES, ConfigurationError
from cpu_prefix_cache.deciding import parse_bytes, policy_of
from cpu_prefix_cache.tier import parse_tier
from offline_generation_report import check_json

PIECES = {  # --corrupt -> the kinds of group that have such a piece
    "chunk": ("prefix",),
    "window": ("window", "chunk-local"),
    "state": ("state",),
}


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, with sizes in bytes. Raises ConfigurationError for what cannot be carried out."""
    options = parse(argv)
    options.host_bytes = parse_bytes(options.host_bytes)
    policy_of(options.policy)  # raises
    options.tier = None if options.tier is None else parse_tier(options.tier)
    for option in ("device_blocks", "host_bytes", "documents", "rounds", "max_new_tokens"):
        if getattr(options, option) < 1:
            raise ConfigurationError(f"--{option.replace('_', '-')} must be at least 1, got {getattr(options, option)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: there is no CUDA device here")
    if options.json:
        check_json(options.json)
        if options.prompts and options.json.resolve() == options.prompts.resolve():
            raise ConfigurationError(f"--json {options.json} would overwrite the prompts: name another file")
    return options


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Offline generation that loads shared prefixes from host memory.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--arch", choices=ARCHITECTURES, default="full", help="a small built-in model")
    which.add_argument("--model", help="a local or hub checkpoint, with its tokenizer")
    parser.add_argument("--byte-tokens", action="store_true", help="each byte is a token: no tokenizer is loaded")
    parser.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="for a model that does not say it, like Mamba"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--offload", choices=(*OFFLOAD_MODES, "off"), default="lazy")
    parser.add_argument("--policy", default="lru", help=f"{', '.join(POLICIES)}, or adaptive@N (docs/policies.md)")
    parser.add_argument("--device-blocks", type=int, default=512, help="blocks of 16 tokens in the device pool")
    parser.add_argument("--host-bytes", metavar="SIZE", default="2GiB", help="host memory, such as 2GiB or 500MB")
    parser.add_argument(
        "--tier",
        metavar="file:PATH:SIZE or URL",
        help="below host memory: files, such as file:/nvme/kv:64GiB, or a store, redis://HOST",
    )
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=12)
    parser.add_argument("--prompts", type=Path, help='lines of {"prompt": "..."}, asked in every round')
    parser.add_argument("--show", action="store_true", help="print the text of every answer")
    parser.add_argument("--corrupt", choices=tuple(PIECES), help="damage one loaded piece: the run must notice")
    parser.add_argument("--json", type=Path, help="write what the table shows, and more, to this file")
    return parser.parse_args(argv)
