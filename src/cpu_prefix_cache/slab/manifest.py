"""The purpose of a rank's folder, spelled out. What is in a folder is used again only for the same."""

import json
from pathlib import Path
from typing import Any

from cpu_prefix_cache.slab.durable import write_durably
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.slab.private import read_small
from cpu_prefix_cache.slab.tier import RankPart

NAME = "manifest.json"
VERSION = 1
SIZES = ("slots", "nbytes")  # may have changed: slots that both have are the same

Manifest = dict[str, Any]


def manifest_of(namespace: Namespace, part: RankPart, slot_bytes: int, nbytes: int) -> Manifest:
    """`nbytes` is what the user gave all owners."""
    return {
        "version": VERSION,
        "namespace": namespace.spelled,
        "rank": part.number,
        "ranks": part.owners,
        "slots": part.slots,
        "slot_bytes": slot_bytes,
        "nbytes": nbytes,
    }


def read_manifest(folder: int, where: Path) -> Manifest | None:
    """None: the folder was never made ready. A damaged one counts as none."""
    data = read_small(folder, NAME, where)
    if data is None:
        return None
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def write_manifest(folder: int, manifest: Manifest) -> None:
    write_durably(folder, NAME, json.dumps(manifest, indent=1).encode())


def difference(there: Manifest, wanted: Manifest) -> str:
    """The reason why the bytes of a folder cannot be used, for people. Empty: there is none."""
    if not there:
        return f"{NAME} cannot be read"
    for name, value in wanted.items():
        if name not in SIZES and there.get(name) != value:
            before = there.get(name)
            if isinstance(value, dict) and isinstance(before, dict):
                return f"{name}: {_first_difference(before, value)}"
            return f"{name} was {before!r}, and is {value!r}"
    return ""


def _first_difference(before: Manifest, now: Manifest) -> str:
    name = next(each for each in (*now, *before) if before.get(each) != now.get(each))
    return f"{name} was {before.get(name)!r}, and is {now.get(name)!r}"
