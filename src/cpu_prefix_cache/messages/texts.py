"""Texts that users give as names: they become digests, and names in a store."""

from cpu_prefix_cache.messages.errors import ConfigurationError


def check_text(what: str, text: object) -> None:
    """Raise ConfigurationError unless it is a text that is not empty, of characters that UTF-8 has."""
    if not isinstance(text, str) or not text:
        raise ConfigurationError(f"{what} is a text that is not empty; got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"{what} is a text of characters that UTF-8 has; got {text!r}") from error
