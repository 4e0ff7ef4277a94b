"""`cpu-prefix-cache keep` that waits long for its tier: on a busy machine reading takes longer than it should."""

import sys
from dataclasses import replace

from cpu_prefix_cache import SharedTier
from cpu_prefix_cache.stores.dialect import parse_tier
from cpu_prefix_cache.tiers import promotions
from cpu_prefix_cache.tools.cli import main
from cpu_prefix_cache.tools.keep import keep_command

PATIENCE = 10.0


def patient(text):
    tier = parse_tier(text)
    return replace(tier, ask_seconds=PATIENCE) if isinstance(tier, SharedTier) else tier


if __name__ == "__main__":
    promotions.PENDING_GRACE_SECONDS, keep_command.parse_tier = PATIENCE, patient
    sys.exit(main())
