"""What a rank's folder was made for, spelled out. A folder is used again only for the same."""

import json
from pathlib import Path
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.slab.durable import write_durably
from cpu_prefix_cache.slab.namespace import Namespace

NAME = "manifest.json"
VERSION = 1


def manifest_of(
    namespace: Namespace, *, rank: int, ranks: int, slots: int, slot_bytes: int, nbytes: int
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "namespace": namespace.spelled,
        "rank": rank,
        "ranks": ranks,
        "slots": slots,
        "slot_bytes": slot_bytes,
        "nbytes": nbytes,
    }


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """None: the folder was never made ready. Raises ConfigurationError for one that cannot be read."""
    path = folder / NAME
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}); delete the folder {folder}") from error
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
        raise ConfigurationError(f"{path} is not of version {VERSION}; delete the folder {folder}")
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_durably(folder / NAME, json.dumps(manifest, indent=1).encode())


def check_same(folder: Path, there: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise ConfigurationError, naming what differs."""
    differing = [name for name in wanted if there.get(name) != wanted[name]]
    if differing:
        name = differing[0]
        raise ConfigurationError(
            f"{folder} was made for {name} {there.get(name)!r}, and {wanted[name]!r} is asked for; "
            "ask for the same, or delete the folder"
        )
