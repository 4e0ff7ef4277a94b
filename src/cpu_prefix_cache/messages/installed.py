"""Entry points, by which other packages add policies and stores: found by name, and imported when they are asked for.

The import of importlib.metadata takes 40 to 50 ms of a 2-core AMD EPYC VM's processor, and a look 10: so both wait.
"""

from typing import TYPE_CHECKING, Any

from cpu_prefix_cache.messages.errors import ConfigurationError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def installed(group: str) -> "dict[str, EntryPoint]":
    """The entry points of this group, by name."""
    from importlib.metadata import entry_points

    return {each.name: each for each in entry_points(group=group)}


def load(point: "EntryPoint", named: str) -> Any:
    """Load the object that it names. Raises ConfigurationError, which begins with `named`, where there is none."""
    try:
        return point.load()
    except (ImportError, AttributeError) as missing:
        raise ConfigurationError(f"{named} cannot be imported: {missing}") from missing
