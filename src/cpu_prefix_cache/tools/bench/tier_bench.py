"""`cpu-prefix-cache bench --tier PATH[:SIZE]`: what the disk under PATH gives a tier in files. `--tier URL`: a store.

A file of SIZE bytes, or values under a name of their own, are written there, read, and removed, also when this is
interrupted.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from cpu_prefix_cache.messages.errors import ConfigurationError, PrefixCacheError
from cpu_prefix_cache.messages.sizes import parse_bytes
from cpu_prefix_cache.slab.private import open_path
from cpu_prefix_cache.stores.opening import open_store
from cpu_prefix_cache.stores.settings import SharedTier
from cpu_prefix_cache.tools.bench.file_rates import FileUnderTest
from cpu_prefix_cache.tools.bench.slot_rates import SlotRate, SlotsUnderTest, measure_slots
from cpu_prefix_cache.tools.bench.store_rates import StoreUnderTest
from cpu_prefix_cache.tools.bench.tier_report import as_json, break_even, large, tier_table
from cpu_prefix_cache.tools.replay.models import prefix_bytes_per_token
from cpu_prefix_cache.tools.replay.options import check_can_be_written, groups_of, write_json
from cpu_prefix_cache.tools.replay.units import show_bytes

SLOT_BYTES = (2 << 20, 256 << 10)
FILE_BYTES = 1 << 30
STORE_BYTES = 256 << 20  # others use the store, too
LEAST_BYTES = 64 << 20  # what is in flight at once is twice as much
BLOCK_TOKENS = 16
BUFFERED = "through the system's cache, which is emptied after each run: the file system refuses O_DIRECT"


def run_tier(args: argparse.Namespace) -> int:
    """Raises ConfigurationError for what cannot be measured."""
    bytes_per_token = prefix_bytes_per_token(groups_of(args, BLOCK_TOKENS))
    if args.prefill_rate is not None and not bytes_per_token:
        raise ConfigurationError("--prefill-rate needs the bytes of a token: give --model or --bytes-per-token")
    if args.json is not None:
        check_can_be_written("json", args.json)
    where, what, rates, is_direct = store_measured(args.tier) if "://" in args.tier else file_measured(args.tier)
    print(f"{what}\n{tier_table(rates)}")
    if bytes_per_token:
        print(break_even(large(rates, "read"), bytes_per_token, args.prefill_rate))
    if args.json is not None:
        write_json(args.json, as_json(where, rates, is_direct=is_direct))
    return 0


class MeasuredSlots(NamedTuple):
    """`where` the slots are, and `what` was measured, for people."""

    where: str
    what: str
    rates: list[SlotRate]
    is_direct: bool


def file_measured(text: str) -> MeasuredSlots:
    """PATH[:SIZE], by all sizes of slots."""
    path, size = path_and_size(text)
    os.close(open_path(path))
    rates: list[SlotRate] = []
    is_direct = True
    with tempfile.TemporaryDirectory(prefix="bench-", dir=path) as folder:
        for slot_bytes in SLOT_BYTES:
            own = Path(folder) / str(slot_bytes)
            own.mkdir()
            file = FileUnderTest(str(own), size, slot_bytes)
            rates += measured(file)
            is_direct = file.is_direct
    what = f"a file of {show_bytes(size)} in {path}, {'O_DIRECT' if is_direct else BUFFERED}"
    return MeasuredSlots(path, what, rates, is_direct)


def store_measured(url: str) -> MeasuredSlots:
    """By all sizes of values."""
    where, store = SharedTier(url).address, open_store(url)
    rates: list[SlotRate] = []
    try:
        for slot_bytes in SLOT_BYTES:
            rates += measured(StoreUnderTest(store, where, STORE_BYTES, slot_bytes))
    except OSError as error:
        raise PrefixCacheError(f"the store at {where} failed: {error}") from error
    finally:
        store.close()
    return MeasuredSlots(where, f"values of {show_bytes(STORE_BYTES)} in {where}", rates, is_direct=False)


def measured(slots: SlotsUnderTest) -> list[SlotRate]:
    """The rates; and nothing is left behind."""
    try:
        return list(measure_slots(slots))
    finally:
        slots.close()
        slots.remove()


def path_and_size(text: str) -> tuple[str, int]:
    """PATH, or PATH:SIZE where SIZE is one.

    >>> path_and_size("/nvme"), path_and_size("/nvme:2GiB")
    (('/nvme', 1073741824), ('/nvme', 2147483648))
    """
    path, colon, size = text.rpartition(":")
    if not colon or Path(text).is_dir():
        return text, FILE_BYTES
    num_bytes = parse_bytes(size)
    if num_bytes < LEAST_BYTES:
        raise ConfigurationError(f"a file of less than {show_bytes(LEAST_BYTES)} measures little, got {text!r}")
    return path, num_bytes
