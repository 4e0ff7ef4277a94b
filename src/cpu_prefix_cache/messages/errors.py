"""Errors, sorted by the person who must act."""


class PrefixCacheError(Exception):
    """Base of everything this library raises on purpose."""


class ConfigurationError(PrefixCacheError, ValueError):
    """The operator must change the configuration; the message names the remedy. Raised at construction only."""


class TierUnavailable(PrefixCacheError, OSError):
    """A tier cannot be opened at the moment: nothing answers there, or not as it should, and what is said of it may be
    right. The operator looks after the server or the disk that the message names. The cache goes on without the tier,
    and tries again.
    """


class PoolExhausted(PrefixCacheError):
    """Too many blocks are pinned or being written. Nobody acts: the engine asks for less, or later.

    `available`: how many of the nodes that were wanted found room; none, where a checkpoint did not.
    """

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"wanted {wanted} chunks, but only {available} are free or can be evicted")
        self.wanted = wanted
        self.available = available


class CopyFailed(PrefixCacheError):
    """A load has not brought what it was to, and its device blocks hold anything. The engine computes it."""


class InternalError(PrefixCacheError):
    """A rule of this library does not hold: a defect in it, which no caller can cause."""


class MisuseError(PrefixCacheError):
    """The caller broke a rule, such as releasing a pin twice. The author of the engine fixes the caller."""
