"""A store by its URL, whose scheme selects its maker: ours, or an entry point of another package.

[project.entry-points."cpu_prefix_cache.stores"]
myscheme = "my_package:MyStore"  # called with the URL
"""

from typing import TYPE_CHECKING

from cpu_prefix_cache.messages.errors import ConfigurationError, TierUnavailable
from cpu_prefix_cache.messages.installed import installed, load
from cpu_prefix_cache.stores.keyed_store import KeyedStore

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "cpu_prefix_cache.stores"
REDIS, MOONCAKE = (
    "cpu_prefix_cache.stores.redis_store:RedisStore",
    "cpu_prefix_cache.stores.mooncake_store:MooncakeStore",
)
OURS = {"redis": REDIS, "rediss": REDIS, "unix": REDIS, "mooncake": MOONCAKE}


def open_store(url: str) -> KeyedStore:
    """Raises ConfigurationError where the URL is wrong, TierUnavailable where what it names does not answer now. No
    message has more of the URL than its scheme: the rest may be a password.
    """
    scheme, _, rest = url.partition("://")
    known = _known()
    if not rest or scheme not in known:
        raise ConfigurationError(
            f"a store is SCHEME://ADDRESS, and its scheme one of {', '.join(sorted(known))} (ours, and what installed "
            f"packages have as entry points of {GROUP}); got {f'{scheme}://' if rest else 'no such text'}"
        )
    make = load(known[scheme], f"the store for {scheme}://")
    try:
        store = make(url)
    except TierUnavailable:
        raise
    except OSError as failed:
        raise TierUnavailable(f"the store at {scheme}:// cannot be opened: {failed}") from failed
    if not isinstance(store, KeyedStore):
        raise ConfigurationError(f"{known[scheme].value}, which {scheme}:// names, made no KeyedStore but {store!r}")
    return store


def check_kind(kind: str, url: object) -> None:
    """Raise ConfigurationError unless this kind of store is known, and `url` is of one: "rediss://host" is a redis."""
    if kind not in _known():
        got = repr(kind) if kind.isalnum() else "in a text"  # which may be a URL with a password
        raise ConfigurationError(f"unknown kind of tier {got}; known are file, {', '.join(sorted(_known()))}")
    if isinstance(url, str) and not url.startswith(kind):
        begin = f"{url.partition('://')[0]}://" if "://" in url else "anything else"  # which may be a password
        raise ConfigurationError(f"a tier of kind {kind} has a URL that begins with {kind}://, not with {begin}")


def _known() -> "dict[str, EntryPoint]":
    """By scheme; ours last, so that no package takes their place."""
    from importlib.metadata import EntryPoint  # here, since it takes its time (installed.py)

    return installed(GROUP) | {name: EntryPoint(name, value, GROUP) for name, value in OURS.items()}
