"""Options of a tier in files. Knows no torch, so that the process that decides can read it, too."""

from dataclasses import dataclass

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.sizes import parse_bytes
from cpu_prefix_cache.slab.identity import Identity, Weights, check_identity, identity_of

KINDS = ("file",)
CRYPTOGRAPHIC = ("sha256", "sha256_cbor")  # digests of 32 bytes that nobody can find a second text for


@dataclass(frozen=True, slots=True)
class FileTier:
    """`nbytes` bytes on disk under the folder `path`, for all ranks of this machine together. What other models or
    releases have left there gives up its room, unless `keep_others`.

    `model` and `revision` say whose KV it is; a `revision` changes with the weights. In place of both, or of the
    revision, `weights` is the folder that the weights are in. Some connectors know all of it. `hash` is what the keys
    are digests by. `offload` is "lazy", "eager" or None: the decider chooses. `flush_seconds` are spent at most at the
    end of the process on what is not in the tier yet.

    Raises ConfigurationError.
    """

    path: str
    nbytes: int
    model: str | None = None
    revision: str | None = None
    hash: str = "sha256"
    offload: str | None = None
    policy: str = "lru"
    flush_seconds: float = 10.0
    weights: Weights | None = None
    keep_others: bool = False
    engine: int = 0  # engines with the same path: each above 0 has a folder of its own there

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigurationError(f"a file tier needs the path of a folder on a local disk, got {self.path!r}")
        if not isinstance(self.nbytes, int) or isinstance(self.nbytes, bool) or self.nbytes < 1:
            raise ConfigurationError(
                f"the size of a file tier is a whole number of bytes, at least 1, got {self.nbytes!r}; "
                "a text such as 'file:/nvme/kv:64GiB' is read by parse_file_tier"
            )
        if self.offload not in (None, "lazy", "eager"):
            raise ConfigurationError(f"offload must be lazy, eager or None, got {self.offload!r}")
        if not self.flush_seconds >= 0:
            raise ConfigurationError(f"flush_seconds must be at least 0, got {self.flush_seconds!r}")
        check_hash(self.hash)
        check_identity(self.model, self.revision, self.weights)
        if type(self.keep_others) is not bool:
            raise ConfigurationError(f"keep_others is True or False, got {self.keep_others!r}")

    @property
    def identity(self) -> Identity:
        """The identity of its KV. Raises ConfigurationError where that is not known."""
        return identity_of(self.model, self.revision, self.weights)

    @property
    def folders(self) -> tuple[str, ...]:
        """Below `path`, one in the other, in which the folders of models are."""
        return (f"engine-{self.engine}",) if self.engine else ()

    @property
    def folder(self) -> str:
        """The last of them, for people."""
        return "/".join((self.path, *self.folders))


def check_hash(name: str) -> None:
    """Raise ConfigurationError unless keys by this digest may be kept on disk (rule 17)."""
    if name not in CRYPTOGRAPHIC:
        raise ConfigurationError(
            f"bytes on disk are served by their key alone, so keys must be digests by {' or '.join(CRYPTOGRAPHIC)}, "
            f"and {name!r} is none; set the engine's prefix hash to sha256"
        )


def parse_file_tier(text: str) -> FileTier:
    """The tier that "file:PATH:SIZE" names. Raises ConfigurationError.

    >>> parse_file_tier("file:/nvme/kv:1.5GiB").nbytes
    1610612736
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        got = repr(kind) if rest and kind.isalpha() else "in a text"  # any other part of a URL may be of a password
        raise ConfigurationError(
            f"unknown kind of tier {got}; known is file, as in file:/nvme/kv:64GiB, and the URL of a store has ://"
        )
    path, _, size = rest.rpartition(":")
    if not path:
        raise ConfigurationError(f"a file tier is given as file:PATH:SIZE, such as file:/nvme/kv:64GiB; got {text!r}")
    return FileTier(path, parse_bytes(size))
