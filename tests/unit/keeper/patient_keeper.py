"""`cpu-prefix-cache keep` that waits long for its files: on a busy machine reading takes longer than it should."""

import sys

from cpu_prefix_cache.tiers import promotions
from cpu_prefix_cache.tools.cli import main

if __name__ == "__main__":
    promotions.PENDING_GRACE_SECONDS = 10.0
    sys.exit(main())
