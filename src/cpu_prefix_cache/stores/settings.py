"""SharedTier: a tier in a store that several machines share, as a user describes it. Knows no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.tier import TierOptions
from cpu_prefix_cache.slab.tier import RankPart, Tier, check_option, is_seconds
from cpu_prefix_cache.stores.keyed_store import KeyedStore

if TYPE_CHECKING:
    import torch

    from cpu_prefix_cache.model.planner import Piece
    from cpu_prefix_cache.slab.namespace import Namespace
    from cpu_prefix_cache.slab.rank_tier import RankTier

ASK_SECONDS = 0.02  # some steps of decode; a store on the same network answers in one or two milliseconds
REMEMBERED = 8  # times the host's blocks, at some 200 bytes each. What is forgotten of a store is asked for again


@dataclass(frozen=True, slots=True)
class SharedTier(Tier):
    """`store` keeps what host memory cannot, for all processes that have the same model in the same layout. It is a
    KeyedStore, or the URL of one ("redis://host:6379"), which each rank opens.

    All who give the same `model` and `revision` share; machines whose copies of `weights` have other times of change do
    not meet. An engine of its own whose processes have parts of a model, or lay the same shapes out in another order,
    must name it in `model`. `offload` is "eager", so that others find what this process has computed, or "lazy": only
    what its own host evicts. A request waits at most `ask_seconds` for the store's answer. After a reset without a
    revision, values have names that no other process has. The other options are those of every Tier.

    Raises ConfigurationError.
    """

    store: KeyedStore | str = field(repr=False)  # a URL may have a password
    offload: str | None = field(default="eager", kw_only=True)
    ask_seconds: float = field(default=ASK_SECONDS, kw_only=True)

    MODES: ClassVar[tuple[str | None, ...]] = ("lazy", "eager")

    def __post_init__(self) -> None:
        if not isinstance(self.store, KeyedStore) and (not isinstance(self.store, str) or "://" not in self.store):
            got = "another text" if isinstance(self.store, str) else type(self.store).__name__  # it may be a password
            raise ConfigurationError(f"store of a tier is a KeyedStore or a URL, such as redis://host:6379; got {got}")
        is_right = is_seconds(self.ask_seconds) and self.ask_seconds > 0
        check_option("ask_seconds", self.ask_seconds, is_right, "a number of seconds above 0")
        Tier.__post_init__(self)

    @property
    def address(self) -> str:
        """Where the store is, without a password; how the URL begins, where a password may be anywhere in it."""
        if isinstance(self.store, KeyedStore):
            return type(self.store).__name__
        try:
            parts = urlsplit(self.store)
            elsewhere = f"{parts.path}{parts.query}{parts.fragment}{parts.port or ''}"
        except ValueError:  # the port is no number
            elsewhere = "@"
        scheme = self.store.partition("://")[0]
        return f"{scheme}://" if "@" in elsewhere else f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def slots(self, slot_bytes: int, host_blocks: int, owners: int = 1) -> int:
        """Blocks of the store that this process remembers."""
        return REMEMBERED * host_blocks

    def options(self, slots: int) -> TierOptions:
        return TierOptions(slots, self.offload, self.policy, self.ask_seconds)

    def open(
        self, namespace: "Namespace", region: "torch.Tensor | memoryview", pieces: "Sequence[Piece]", part: RankPart
    ) -> "RankTier":
        """The first rank asks the store for all: what another one lacks is refused when it is read."""
        from cpu_prefix_cache.slab.rank_tier import RankTier
        from cpu_prefix_cache.stores.asker import Asker
        from cpu_prefix_cache.stores.keyed_values import KeyedValues

        store = self._opened()
        values = KeyedValues(
            store, namespace, number=part.number, owners=part.owners, slot_bytes=region.nbytes // len(region)
        )
        asker = None if part.rank else Asker(store, lambda: values.names, pieces)
        return RankTier(values, region, pieces, part.rank, asker)

    def _opened(self) -> KeyedStore:
        if isinstance(self.store, KeyedStore):
            return self.store
        from cpu_prefix_cache.stores.opening import open_store

        return open_store(self.store)

    def __str__(self) -> str:
        return f"a tier in {self.address}"
