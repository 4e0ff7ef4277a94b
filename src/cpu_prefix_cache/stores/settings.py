"""What a user says of a store that several machines share. Knows no torch: the process that decides reads it, too."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.slab.identity import Identity, Weights, check_identity, identity_of
from cpu_prefix_cache.slab.settings import FileTier, check_hash, parse_file_tier
from cpu_prefix_cache.stores.keyed_store import KeyedStore

ASK_SECONDS = 0.02  # some steps of decode; a store on the same network answers in one or two milliseconds
REMEMBERED = 8  # times the host's blocks, at some 200 bytes each. What is forgotten of a store is asked for again


@dataclass(frozen=True, slots=True)
class SharedTier:
    """`store` keeps what host memory cannot, for all processes that have the same model in the same layout. It is a
    KeyedStore, or the URL of one ("redis://host:6379"), which each rank opens.

    `model` and `revision` say whose KV it is: all who say the same, share; so a `revision` changes with the weights.
    In place of both, or of the revision, `weights` is the folder that the weights are in; machines whose copies have
    other times of change do not meet. Some connectors know all of it. An engine of its own whose processes have parts
    of a model, or lay the same shapes out in another order, says so in `model`.
    `hash` is what the keys are digests by. `offload` is "eager", so that others find what this process has computed, or
    "lazy": only what its own host evicts. A request waits at most `ask_seconds` to hear what the store has.
    `flush_seconds` are spent at most at the end of the process on what is not in the store yet.

    Raises ConfigurationError.
    """

    store: KeyedStore | str = field(repr=False)  # a URL may have a password
    model: str | None = None
    revision: str | None = None
    hash: str = "sha256"
    offload: str = "eager"
    policy: str = "lru"
    ask_seconds: float = ASK_SECONDS
    flush_seconds: float = 10.0
    weights: Weights | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.store, KeyedStore) and (not isinstance(self.store, str) or "://" not in self.store):
            got = "another text" if isinstance(self.store, str) else type(self.store).__name__  # it may be a password
            raise ConfigurationError(
                f"the store of a SharedTier is a KeyedStore or a URL, such as redis://host:6379; got {got}"
            )
        if self.offload not in ("lazy", "eager"):
            raise ConfigurationError(f"offload must be lazy or eager, got {self.offload!r}")
        if not self.ask_seconds > 0 or not self.flush_seconds >= 0:
            raise ConfigurationError(
                f"ask_seconds must be above 0 and flush_seconds at least 0, got {self.ask_seconds!r} and "
                f"{self.flush_seconds!r}"
            )
        check_hash(self.hash)
        check_identity(self.model, self.revision, self.weights)

    @property
    def identity(self) -> Identity:
        """Whose KV is in it. Raises ConfigurationError where that is not known."""
        return identity_of(self.model, self.revision, self.weights)

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

    def open(self) -> KeyedStore:
        """The store. Raises ConfigurationError where there is none."""
        if isinstance(self.store, KeyedStore):
            return self.store
        from cpu_prefix_cache.stores.opening import open_store

        return open_store(self.store)

    @staticmethod
    def num_remembered(host_blocks: int) -> int:
        """How many blocks of the store this process remembers."""
        return REMEMBERED * host_blocks


def parse_tier(text: str) -> FileTier | SharedTier:
    """The tier that "file:PATH:SIZE" names, or the URL of a store. Raises ConfigurationError.

    >>> parse_tier("file:/nvme/kv:1.5GiB").nbytes
    1610612736
    >>> parse_tier("redis://cache:6379").store
    'redis://cache:6379'
    """
    return SharedTier(text) if "://" in text else parse_file_tier(text)
