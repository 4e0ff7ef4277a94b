"""The option `tier` of vLLM's and ATOM's connectors: a tier as a text or a dictionary (`stores/dialect.py`).

"tier": "file:/nvme/kv:1TiB"
"tier": {"kind": "redis", "store": "redis://cache:6379", "revision_file": "/run/revision"}
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from connector.common.options import TIER
from connector.tier.revision import REVISION_FILE, check_file, read_revision
from cpu_prefix_cache import FileTier, SharedTier
from cpu_prefix_cache.tier import parse_tier


def tier_option(_: str, spelled: Any) -> "TierOption":
    """The check of this option, as in `connector/common/options.py`. Raises ConfigurationError."""
    return TierOption.of(spelled)


@dataclass(frozen=True)
class TierOption:
    """The tier as the operator gives it: for all engines, and perhaps without the names of a model and of weights."""

    tier: FileTier | SharedTier
    revision_file: str | None = None

    @classmethod
    def of(cls, spelled: Any) -> "TierOption":
        """Raises ConfigurationError."""
        tier = parse_tier(spelled, extra=(REVISION_FILE,))
        file = spelled.get(REVISION_FILE) if isinstance(spelled, Mapping) else None
        check_file(file, tier.revision, place=TIER)
        return cls(tier, file)

    @property
    def names_weights(self) -> bool:
        return self.tier.revision is not None or self.revision_file is not None

    def of_engine(self, number: int, *, model: str, weights: Callable[[], str], hash: str) -> FileTier | SharedTier:
        """The tier of one of the engines. `weights` are asked for if the operator has given no revision."""
        file = self.revision_file
        revision = self.tier.revision if file is None else read_revision(file)
        return replace(
            self.tier.of_engine(number), model=self.tier.model or model, revision=revision or weights(), hash=hash
        )
