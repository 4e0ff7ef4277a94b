"""The kinds of KV state a model keeps, and which blocks of each must be present to resume at a boundary.

    prefix        every block before it                     full attention, MLA
    window        the blocks the window still sees          sliding-window attention
    chunk-local   the blocks since the local chunk began    chunked-local attention
    state         the page at the boundary                  Mamba, linear attention, short convolutions
    none          nothing: the engine rebuilds it

With blocks of 16 tokens, to resume at token 96:

    prefix                        [0][1][2][3][4][5]
    window of 40 tokens                    [3][4][5]     token 96 sees 57 ... 96
    chunk-local, chunks of 64                 [4][5]     its local chunk began at 64
    state                                        [5]     the page written at the end of block 5
"""

import enum
from dataclasses import dataclass

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.numbers import is_whole


class GroupKind(enum.Enum):
    PREFIX = "prefix"
    WINDOW = "window"
    CHUNK_LOCAL = "chunk-local"
    STATE = "state"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers whose KV lives in blocks of one size and is needed by one rule.

    `block_tokens` is how many tokens one block of the group covers, or how many lie between two pages of a state. It
    takes `device_blocks` device blocks of `block_bytes`: all layers and parts (K, V, scales) of the group on one rank.

    `window_tokens` is what a window sees, its own token included, or the length of a local chunk. A window keeps
    `extra_tokens` more (for drafts that may be rejected). With `lookahead_tokens` d, a prefix group can resume at a
    boundary b only if it has b + d too (EAGLE, MTP). A `replicated` group has the same bytes on every rank.

    Raises ConfigurationError, naming the group.
    """

    name: str
    kind: GroupKind
    block_tokens: int
    block_bytes: int
    window_tokens: int = 0
    extra_tokens: int = 0
    lookahead_tokens: int = 0
    replicated: bool = False
    device_blocks: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.kind, GroupKind):
            known = ", ".join(kind.value for kind in GroupKind)
            raise ConfigurationError(f"group {self.name!r} has the unknown kind {self.kind!r}; known kinds are {known}")
        has_window = self.kind in (GroupKind.WINDOW, GroupKind.CHUNK_LOCAL)
        self._check("block_tokens", least=1)
        self._check("block_bytes", least=1)
        self._check("device_blocks", least=1)
        self._check("window_tokens", least=int(has_window), only=has_window)
        self._check("extra_tokens", least=0, only=self.kind is GroupKind.WINDOW)
        self._check("lookahead_tokens", least=0, only=self.kind is GroupKind.PREFIX)

    def needed(self, boundary: int) -> range:
        """The blocks, counted from token 0, that must be present to resume at token `boundary`, where a block ends."""
        end = boundary // self.block_tokens
        match self.kind:
            case GroupKind.PREFIX:
                return range(end)
            case GroupKind.WINDOW:
                first_token = max(0, boundary - self.window_tokens + 1 - self.extra_tokens)
                return range(min(end, first_token // self.block_tokens), end)
            case GroupKind.CHUNK_LOCAL:
                return range((boundary - boundary % self.window_tokens) // self.block_tokens, end)
            case GroupKind.STATE:
                return range(max(0, end - 1), end)
            case GroupKind.NONE:
                return range(0)

    def _check(self, field: str, *, least: int, only: bool = True) -> None:
        value = getattr(self, field)
        if not is_whole(value, least):
            raise ConfigurationError(f"group {self.name!r} needs {field} of at least {least}, got {value}")
        if value and not only:
            raise ConfigurationError(f"group {self.name!r} is of kind {self.kind.value!r}, which has no {field}")
