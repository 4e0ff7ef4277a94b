"""The tested releases of transformers. Others run with a warning: each model is tried when its cache is made, but names
and kinds of layers change.
"""

import logging
import re
from functools import cache

import transformers

logger = logging.getLogger(__name__)

FIRST = (5, 19)  # of constraints.txt
LAST = (5, 24)  # of constraints-transformers-newest.txt


def is_tested(number: str) -> bool:
    """Whether this release is in the range; a build between releases is not."""
    numbers = re.match(r"(\d+)\.(\d+)", number)
    return numbers is not None and "dev" not in number and FIRST <= (int(numbers[1]), int(numbers[2])) <= LAST


@cache  # once in a process
def warn_if_untested() -> None:
    if not is_tested(number := transformers.__version__):
        span = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
        logger.warning("HostPrefixCache was tested with transformers %s; this is %s", span, number)
