"""NodePool: the pool of a node as an engine describes it. Knows no torch."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cpu_prefix_cache.keeper.protocol import NAMESPACE_BYTES
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.slab.identity import Identity, Weights, check_identity, identity_of
from cpu_prefix_cache.slab.tier import check_hash, check_option, is_seconds

if TYPE_CHECKING:
    from cpu_prefix_cache.model.planner import HybridChunkPlanner
    from cpu_prefix_cache.node.joined_pool import JoinedPool
    from cpu_prefix_cache.slab.namespace import Namespace, Value

SCHEME = "unix:"
PLACE = "pool"  # in sentences that are those of tiers, too
CONNECT_SECONDS = 20.0  # a keeper that follows another one waits some seconds for what engines hand back


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """The pool of the keeper at `address`, such as "unix:/run/kv.sock". `cpu-prefix-cache keep` starts one.

    Engines with the same `model`, `revision` and layout find what the others have computed. In place of both, or of the
    revision, `weights` is the folder that the weights are in. `hash` is the digest that keys are. An engine waits for
    `connect_seconds` at most for the keeper when it starts.

    Raises ConfigurationError.
    """

    address: str = field(kw_only=False)
    model: str | None = None
    revision: str | None = None
    weights: Weights | None = None
    hash: str = "sha256"
    connect_seconds: float = CONNECT_SECONDS

    def __post_init__(self) -> None:
        is_right = isinstance(self.address, str) and self.address.startswith(f"{SCHEME}/")
        if not is_right:
            raise ConfigurationError(f"a pool is at {SCHEME}/PATH, where its keeper listens; got {self.address!r}")
        check_hash(self.hash)
        check_identity(self.model, self.revision, self.weights, place=PLACE)
        is_right = is_seconds(self.connect_seconds) and self.connect_seconds >= 0
        check_option("connect_seconds", self.connect_seconds, is_right, "a number of seconds, at least 0", place=PLACE)

    @property
    def path(self) -> str:
        """Where the keeper listens."""
        return self.address.removeprefix(SCHEME)

    @property
    def identity(self) -> Identity:
        """The identity of the KV. Raises ConfigurationError where that is not known."""
        return identity_of(self.model, self.revision, self.weights, place=PLACE)

    def namespace(
        self, planner: "HybridChunkPlanner", *, dtype: str, ranks: int, extra: "Mapping[str, Value]"
    ) -> "Namespace":
        """Facts that must be equal for its KV to be served by another engine, as those of a `Tier`."""
        from cpu_prefix_cache.slab.namespace import namespace_of

        model, revision = self.identity
        return namespace_of(
            planner, model=model, revision=revision, dtype=dtype, hash=self.hash, ranks=ranks, extra=extra
        )

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
