"""Check, before anything else of this package is imported, that this SGLang has what the connector needs.

The contract of the release that it is tested with names that: the calls of a linker with their parameters, because
SGLang makes them, and one of another meaning would not raise; and of other classes the members that are read.
"""

import json
import logging
from pathlib import Path

import sglang

from connector.common.contract import lacking
from cpu_prefix_cache import ConfigurationError

logger = logging.getLogger(__name__)

TESTED = "0.5.23"
CONTRACT: dict[str, list[str]] = json.loads(Path(__file__).with_name(f"{TESTED}.json").read_text())


def check_interface() -> None:
    """Raises ConfigurationError where the contract is not kept. A warning for another release that keeps it."""
    for name in lacking(CONTRACT):
        raise ConfigurationError(f"SGLang {sglang.__version__} has no {name}: take SGLang {TESTED}")
    if sglang.__version__ != TESTED:
        logger.warning("HostLinker was tested with SGLang %s; this is %s", TESTED, sglang.__version__)


check_interface()
