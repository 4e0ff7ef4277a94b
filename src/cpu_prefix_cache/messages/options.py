"""CacheOptions: choices of a user for a cache, as one value that every layer passes on whole."""

from dataclasses import dataclass

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.numbers import check_whole
from cpu_prefix_cache.messages.texts import check_text

OFFLOAD_MODES = ("lazy", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Choices of a user: `offload` is one of OFFLOAD_MODES, `policy` the name of an eviction policy.

    A chunk is stored once `store_after` prompts of at least `min_store_tokens` tokens had it. The defaults hold nothing
    back.

    If the model needs checkpoints, they are kept for the last boundaries of prompts and of finished requests, where a
    second continuation of a prefix appears, and every `checkpoint_interval` tokens if given (a multiple of the grid).

    Hits of fewer than `min_load_tokens` tokens are misses. None: of as many as are computed faster than loaded, by what
    `prefilled` and the ranks report (break_even.py).

    Raises ConfigurationError.
    """

    offload: str = "lazy"
    policy: str = "lru"
    store_after: int = 1
    min_store_tokens: int = 0
    checkpoint_interval: int | None = None
    min_load_tokens: int | None = 0

    def __post_init__(self) -> None:
        if self.offload not in OFFLOAD_MODES:
            raise ConfigurationError(f"offload must be one of {', '.join(OFFLOAD_MODES)}; got {self.offload!r}")
        check_text("policy", self.policy)
        check_whole("store_after", self.store_after, 1)
        check_whole("min_store_tokens", self.min_store_tokens, 0)
        if self.checkpoint_interval is not None:
            check_whole("checkpoint_interval", self.checkpoint_interval, 1)
        if self.min_load_tokens is not None:
            check_whole("min_load_tokens", self.min_load_tokens, 0)

    @property
    def holds_back(self) -> bool:
        """Whether any chunk may be held back: else nobody needs to count prompts."""
        return self.store_after > 1 or self.min_store_tokens > 0


USUAL_OPTIONS = CacheOptions()
