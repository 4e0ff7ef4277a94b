"""The kinds of KV state a model keeps, a class each, and which blocks must be present to resume at a boundary.

    PrefixGroup       every block before it                     full attention, MLA
    WindowGroup       the blocks the window still sees          sliding-window attention
    ChunkLocalGroup   the blocks since the local chunk began    chunked-local attention
    StateGroup        the page at the boundary                  Mamba, linear attention, short convolutions

With blocks of 16 tokens, to resume at token 96:

    prefix                        [0][1][2][3][4][5]
    window of 40 tokens                    [3][4][5]     token 96 sees 57 ... 96
    chunk-local, chunks of 64                 [4][5]     its local chunk began at 64
    state                                        [5]     the page written at the end of block 5

Another kind is another class, here or in an engine's own code: nothing that is given a group asks for its class.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.numbers import is_whole
from cpu_prefix_cache.model.codec import RAW, Codec, codec_of


@dataclass(frozen=True, kw_only=True)
class Group(ABC):
    """Layers whose KV lives in blocks of one size and is needed by one rule, that of the class.

    `block_tokens` is how many tokens one block of the group covers, or how many lie between two pages of a state. It
    takes `device_blocks` device blocks of `block_bytes`: all layers and parts (K, V, scales) of the group on one rank.
    Of each block the ranks have `lanes` different ones: 1 where it is the same on all, None where each has its own.
    `codec` names the form in which the host keeps it (codec.py).

    A class has a `kind`, `needed`, and as fields the numbers of its rule, which `spelled` names.

    Raises ConfigurationError, naming the group, for a number below its default, or below 1 where it has none, and for
    a codec that does not exist or cannot take its blocks.
    """

    kind: ClassVar[str]  # as namespaces and tables spell it
    is_prefix: ClassVar[bool] = False  # every block before a boundary is needed: chunks have them, not checkpoints
    is_state: ClassVar[bool] = False  # a block is one value, at its end: as large for any number of tokens, never split
    needs_last: ClassVar[bool] = False  # the last block is needed at every boundary but 0, which saves looking further

    name: str
    block_tokens: int
    block_bytes: int
    device_blocks: int = 1
    lanes: int | None = None
    codec: str = RAW

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 1 if field.default is MISSING else field.default
            if field.type in (int, "int") and not is_whole(value, least):
                raise ConfigurationError(f"group {self.name!r} needs {field.name} of at least {least}, got {value!r}")
        if self.lanes is not None and not is_whole(self.lanes, 1):
            raise ConfigurationError(f"group {self.name!r} needs lanes of at least 1, or None, got {self.lanes!r}")
        try:
            self.form.kept_bytes(self.block_bytes)
        except ConfigurationError as error:
            raise ConfigurationError(f"group {self.name!r}: {error}") from error

    @property
    def form(self) -> Codec:
        return codec_of(self.codec)

    @property
    def kept_bytes(self) -> int:
        """The bytes of a device block on the host."""
        return self.form.kept_bytes(self.block_bytes)

    @abstractmethod
    def needed(self, boundary: int) -> Sequence[int]:
        """The blocks, counted from token 0, that must be present to resume at token `boundary`, where a block ends.

        In ascending order. A block before the boundary that is not needed here is needed at no later one.
        """

    @property
    def lookahead_tokens(self) -> int:
        """How many tokens beyond a boundary must be present, too, to resume there."""
        return 0

    @property
    def spelled(self) -> dict[str, str | int]:
        """Fields of a namespace, by name. People's files are found by them: what a kind spells never changes.

        A class adds the numbers that decide what its blocks hold or which are kept. (The window of 0 is older, and
        groups without a codec are older than codecs.)
        """
        codec: dict[str, str | int] = {} if self.form.spelled is None else {"codec": self.form.spelled}
        return {
            "kind": self.kind,
            "block tokens": self.block_tokens,
            "block bytes": self.block_bytes,
            "window tokens": 0,
            **codec,
        }


@dataclass(frozen=True, kw_only=True)
class PrefixGroup(Group):
    """Full attention, MLA: every block before a boundary is needed.

    With `lookahead_tokens` d it can resume at a boundary b only if it has b + d too (EAGLE, MTP).
    """

    kind: ClassVar[str] = "prefix"
    is_prefix: ClassVar[bool] = True
    lookahead_tokens: int = 0

    def needed(self, boundary: int) -> range:
        return range(boundary // self.block_tokens)


@dataclass(frozen=True, kw_only=True)
class WindowGroup(Group):
    """Sliding-window attention: a token sees `window_tokens` tokens, its own included.

    It keeps `extra_tokens` more (for drafts that may be rejected).
    """

    kind: ClassVar[str] = "window"
    needs_last: ClassVar[bool] = True
    window_tokens: int
    extra_tokens: int = 0

    def needed(self, boundary: int) -> range:
        end = boundary // self.block_tokens
        first_token = max(0, boundary - self.window_tokens + 1 - self.extra_tokens)
        return range(min(end, first_token // self.block_tokens), end)

    @property
    def spelled(self) -> dict[str, str | int]:
        return super().spelled | {"window tokens": self.window_tokens}


@dataclass(frozen=True, kw_only=True)
class ChunkLocalGroup(Group):
    """Chunked-local attention: a token sees those of its local chunk, chunks of `window_tokens` tokens."""

    kind: ClassVar[str] = "chunk-local"
    window_tokens: int

    def needed(self, boundary: int) -> range:
        began = boundary - boundary % self.window_tokens
        return range(began // self.block_tokens, boundary // self.block_tokens)

    @property
    def spelled(self) -> dict[str, str | int]:
        return super().spelled | {"window tokens": self.window_tokens}


@dataclass(frozen=True, kw_only=True)
class StateGroup(Group):
    """Mamba, linear attention, short convolutions: the page at the boundary is needed."""

    kind: ClassVar[str] = "state"
    is_state: ClassVar[bool] = True
    needs_last: ClassVar[bool] = True

    def needed(self, boundary: int) -> range:
        end = boundary // self.block_tokens
        return range(max(0, end - 1), end)
