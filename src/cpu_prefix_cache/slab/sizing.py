"""How many slots a tier has: what fits into its bytes beside the folders that other models have left."""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.slab import manifest, records
from cpu_prefix_cache.slab.folder import check_path
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.slab.settings import FileTier

logger = logging.getLogger(__name__)

SMALL_FILES_BYTES = 64 << 10  # of a rank: lock, manifest, generations, folders
LEAST_BY_HOST = 2  # a tier has at least so many slots to a host block: it holds what the host holds, too


def num_slots(tier: FileTier, namespace: Namespace, slot_bytes: int, ranks: int, host_blocks: int) -> int:
    """The slots of each rank. A folder that this namespace has already keeps its own.

    Raises ConfigurationError when they are fewer than twice the host blocks, with the least size that would do, and
    when the namespace has a folder of another size.
    """
    check_path(tier.path)
    own = Path(tier.path) / namespace.folder
    others = _others(own)
    if others:
        logger.warning("%s counts against the %d bytes of this tier: %s", tier.path, tier.nbytes, _named(others))
    slots = _kept(own, tier, ranks)
    taken, each = sum(others.values()), slot_bytes + records.SIZE
    if slots is None:
        slots = (tier.nbytes - taken - ranks * SMALL_FILES_BYTES) // (ranks * each)
    if slots < LEAST_BY_HOST * host_blocks:
        least = LEAST_BY_HOST * host_blocks * ranks * each + ranks * SMALL_FILES_BYTES + taken
        beside = f", beside {_named(others)}, which may be deleted" if others else ""
        raise ConfigurationError(
            f"a tier of {tier.nbytes} bytes has {max(0, slots)} slots on each of {ranks} ranks{beside}; the host has "
            f"{host_blocks} blocks, so give the tier at least {least} bytes, or do without it"
        )
    return slots


def _kept(own: Path, tier: FileTier, ranks: int) -> int | None:
    found: dict[Path, dict[str, Any]] = {}
    for folder in sorted(own.glob(f"rank-*-of-{ranks}")):
        there = manifest.read_manifest(folder)
        if there is not None:
            found[folder] = there
    for folder, there in found.items():
        if there.get("nbytes") != tier.nbytes:
            raise ConfigurationError(
                f"{folder} was made for a tier of {there.get('nbytes')} bytes, and {tier.nbytes} are asked for; "
                f"ask for the same, or delete the folder {own}"
            )
    counts = {there.get("slots") for there in found.values()}
    if len(counts) > 1 or not all(isinstance(count, int) for count in counts):
        raise ConfigurationError(f"the ranks in {own} have different numbers of slots; delete the folder")
    return next(iter(counts), None)


def _others(own: Path) -> dict[Path, int]:
    """The folders of other namespaces, and the bytes that each takes on the disk."""
    folders = [folder for folder in sorted(own.parent.iterdir()) if folder.is_dir() and folder.name != own.name]
    return {folder: taken for folder in folders if _is_ours(folder) and (taken := sum(_sizes(folder)))}


def _is_ours(folder: Path) -> bool:
    return len(folder.name) == 32 and not set(folder.name) - set("0123456789abcdef")


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # deleted just now
            yield path.lstat().st_blocks * 512


def _named(folders: dict[Path, int]) -> str:
    return ", ".join(f"{folder}{_model(folder)} with {taken} bytes" for folder, taken in folders.items())


def _model(folder: Path) -> str:
    for path in folder.glob(f"rank-*/{manifest.NAME}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            spelled = json.loads(path.read_bytes())["namespace"]
            return f" of {spelled['model']!r}, revision {spelled['revision']!r}"
    return ""
