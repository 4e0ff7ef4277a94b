"""Facts that must be equal for bytes of one process to be served by another, field by field.

Each namespace has a folder of its own, named by a digest of all fields, each of them after its length. So no two
models share a folder, whatever characters their names have, and a model whose weights, dtype or layout has changed
finds an empty one.
"""

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cpu_prefix_cache.memory.layout_version import LAYOUT_VERSION
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.texts import check_text
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.slab.identity import check_hash

FORMAT = "cpu-prefix-cache/slab/1"
LENGTH_BYTES = 8
Value = str | int


@dataclass(frozen=True, slots=True)
class Namespace:
    """Fields in order, by name. Raises ConfigurationError for a value that is neither a whole number nor a text with
    something in it: an empty one is nobody's answer, and so the same for all who gave none.
    """

    fields: tuple[tuple[str, Value], ...]

    def __post_init__(self) -> None:
        for name, value in self.fields:
            if not isinstance(name, str) or not isinstance(value, str | int) or isinstance(value, bool):
                raise ConfigurationError(f"a field of a namespace is a text or a whole number; {name!r} is {value!r}")
            if value == "":
                raise ConfigurationError(f"a field of a namespace is never empty, and {name!r} is; say what it is")
            for text in (name, value):
                if isinstance(text, str):
                    check_text(f"the field {name!r} of a namespace", text)

    @property
    def digest(self) -> bytes:
        """32 bytes. A number and the text that spells it differ."""
        parts = [FORMAT, *(part for name, value in self.fields for part in (name, type(value).__name__, str(value)))]
        encoded = [part.encode() for part in parts]
        return hashlib.sha256(b"".join(len(each).to_bytes(LENGTH_BYTES, "little") + each for each in encoded)).digest()

    @property
    def folder(self) -> str:
        """The name of its folder: 32 hexadecimal digits."""
        return self.digest[:16].hex()

    def of_revision(self, revision: str) -> "Namespace":
        """The same with other weights."""
        return replace(self, fields=(*((each, revision if each == "revision" else v) for each, v in self.fields),))

    @property
    def spelled(self) -> dict[str, Value]:
        """For people, and to be compared."""
        return dict(self.fields)


def namespace_of(
    planner: HybridChunkPlanner,
    *,
    model: str,
    revision: str,
    dtype: str,
    hash: str,
    ranks: int,
    extra: Mapping[str, Value] | None = None,
) -> Namespace:
    """The namespace of one model as one engine keeps it. `extra` is whatever else decides the bytes or the keys, such
    as the sizes of tensor and pipeline parallelism, the engine's layout and its scheme of scales.

    Raises ConfigurationError for keys that are no cryptographic digests, and for an `extra` with a name of ours.
    """
    check_hash(hash)
    fields: dict[str, Value] = {
        "model": model,
        "revision": revision,
        "dtype": dtype,
        "hash": hash,
        "byte order": sys.byteorder,
        "layout version": LAYOUT_VERSION,
        "grid tokens": planner.grid_tokens,
        "block bytes": planner.lane_bytes,
        "ranks": ranks,
        **dict(_geometry(planner)),
    }
    for name in sorted(extra or {}):
        if name in fields:
            raise ConfigurationError(f"{name!r} is a field of every namespace; name an extra one otherwise")
    return Namespace((*fields.items(), *sorted((extra or {}).items())))


def _geometry(planner: HybridChunkPlanner) -> Iterator[tuple[str, Value]]:
    for at, piece in enumerate(planner.pieces):
        group = piece.group
        yield f"group {at}", group.name
        yield from ((f"group {at} {name}", value) for name, value in group.spelled.items())
        yield f"group {at} device blocks", piece.device_blocks
        yield f"group {at} host blocks", piece.host_blocks
        yield f"group {at} piece bytes", piece.num_bytes
        yield f"group {at} replicated", int(group.lanes == 1)
        if group.lanes is not None and group.lanes > 1:
            yield f"group {at} lanes", group.lanes
