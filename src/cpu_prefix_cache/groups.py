"""The kinds of KV state a model keeps, each a group of layers that share one block table.

Every kind answers one question: to resume at a boundary, what must be present?

    prefix        every chunk before it                     full attention, MLA
    window        the blocks the window still sees          sliding-window attention
    chunk-local   the blocks since the chunk began          chunked-local attention
    state         the page at the boundary                  Mamba, linear attention, short convolutions
    none          nothing: the engine rebuilds it
"""

import enum
from dataclasses import dataclass

from cpu_prefix_cache.errors import ConfigurationError


class GroupKind(enum.Enum):
    PREFIX = "prefix"
    WINDOW = "window"
    CHUNK_LOCAL = "chunk-local"
    STATE = "state"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers whose KV lives in blocks of one size and is needed by one rule.

    `block_tokens` is how many tokens one device block of the group covers; `block_bytes` is what that block
    weighs over all the layers and parts (K, V, scales) of the group on one rank.
    """

    name: str
    kind: GroupKind
    block_tokens: int
    block_bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.kind, GroupKind):
            known = ", ".join(kind.value for kind in GroupKind)
            raise ConfigurationError(f"group {self.name!r} has the unknown kind {self.kind!r}; known kinds are {known}")
        for field in ("block_tokens", "block_bytes"):
            if getattr(self, field) < 1:
                raise ConfigurationError(f"group {self.name!r} needs {field} of at least 1, got {getattr(self, field)}")
