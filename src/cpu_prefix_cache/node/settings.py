"""NodePool: the pool of a node as an engine describes it. Knows no torch."""

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from cpu_prefix_cache.keeper.protocol import NAMESPACE_BYTES
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.slab.identity import Identified
from cpu_prefix_cache.slab.tier import check_option, is_seconds

if TYPE_CHECKING:
    from cpu_prefix_cache.node.joined_pool import JoinedPool
    from cpu_prefix_cache.slab.namespace import Namespace

SCHEME = "unix:"
CONNECT_SECONDS = 20.0  # a keeper that follows another one waits some seconds for what engines hand back


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool(Identified):
    """The pool of the keeper at `address`, such as "unix:/run/kv.sock". `cpu-prefix-cache keep` starts one.

    Engines with the same `model`, `revision` and layout find what the others have computed. The other options that
    identify their KV are those of a tier. An engine waits for `connect_seconds` at most for the keeper when it starts.

    Raises ConfigurationError.
    """

    address: str = field(kw_only=False)
    connect_seconds: float = CONNECT_SECONDS

    PLACE: ClassVar[str] = "pool"

    def __post_init__(self) -> None:
        is_right = isinstance(self.address, str) and self.address.startswith(f"{SCHEME}/")
        if not is_right:
            raise ConfigurationError(f"a pool is at {SCHEME}/PATH, where its keeper listens; got {self.address!r}")
        Identified.__post_init__(self)
        seconds = self.connect_seconds
        is_right = is_seconds(seconds) and seconds >= 0
        check_option("connect_seconds", seconds, is_right, "a number of seconds, at least 0", place=self.PLACE)

    @property
    def path(self) -> str:
        """Where the keeper listens."""
        return self.address.removeprefix(SCHEME)

    def taken(self, address: str) -> "JoinedPool":
        """The part in it that this engine's worker gives at `address`, for the process that decides: without torch."""
        from cpu_prefix_cache.node.joined_pool import JoinedPool

        return JoinedPool.taken(address, self, decides=True)


def revision_of(namespace: "Namespace") -> str:
    return str(namespace.spelled["revision"])


def name_of(namespace: "Namespace", revision: str | None) -> bytes:
    """The name that a keeper knows it by, with these weights; with None one that nobody else has."""
    if revision is None:
        return secrets.token_bytes(NAMESPACE_BYTES)
    return namespace.of_revision(revision).digest[:NAMESPACE_BYTES]
