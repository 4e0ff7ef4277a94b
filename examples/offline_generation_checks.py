"""An answer of the engine with the cache, compared with that of the same engine without one.

Equal tokens prove little where a model is sure of its answer, so the logits of the first token are compared, too. And
equality proves nothing unless damage is seen: `CorruptingCopier` zeroes one block that a load has filled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from connector.transformers import Generation, PrefixCachedGenerator
from cpu_prefix_cache.deciding import CacheStatistics
from cpu_prefix_cache.testing import CorruptingCopier

# In standard deviations of the logits. Two correct float32 runs with the same prefill cuts differ by 1e-6; with one
# zeroed block of 16 tokens among 3,500 they differ by 1e-2 and more.
TOLERANCE = 1e-4


@dataclass
class Check:
    """One answer, compared with the same engine without a cache."""

    answer: Generation  # without its logits, of which a long run would fill the memory
    chunked_ttft: float
    one_shot_ttft: float
    logit_error: float  # in standard deviations of the reference logits
    tokens_match: bool
    near_tie: bool  # the two best reference logits are closer than four times the error
    damaged: bool  # a block was corrupted before this answer

    @property
    def agrees(self) -> bool:
        return self.tokens_match and self.logit_error <= TOLERANCE


@dataclass
class Round:
    """One line of the table. Field names are those of --json."""

    round: int
    requests: int
    prompt_tokens: int
    computed_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    ttft_ms_median: float
    ttft_ms_median_host_hit: float | None
    ttft_ms_median_no_cache: float
    max_logit_error: float
    tokens_match: bool
    bytes_stored: int
    bytes_loaded: int
    differences: int
    near_ties: int
    tier_hit_tokens: int | None  # of those on the host; None without a tier


def check(
    prompt: Sequence[int],
    generator: PrefixCachedGenerator,
    reference: PrefixCachedGenerator,
    max_new_tokens: int,
    damage: Sequence[CorruptingCopier],
) -> Check:
    """Answer a prompt with the cache, then without: with the same prefill cuts, and in one shot for its time."""
    answer = generator.answer(prompt, max_new_tokens)
    chunked = reference.answer(prompt, max_new_tokens, cuts=generator.cuts_without_cache(answer))
    one_shot = reference.answer(prompt, 1, cuts=[len(prompt)])
    difference = float((answer.first_logits - chunked.first_logits).abs().max())
    best, second = chunked.first_logits.topk(2).values.tolist()
    return Check(
        answer=replace(answer, first_logits=torch.empty(0)),
        chunked_ttft=chunked.ttft_seconds,
        one_shot_ttft=one_shot.ttft_seconds,
        logit_error=difference / float(chunked.first_logits.std()),
        tokens_match=answer.tokens == chunked.tokens,
        near_tie=best - second < 4 * difference,
        damaged=any(copier.corrupted for copier in damage),
    )


def summary(
    number: int, checks: Sequence[Check], before: CacheStatistics | None, after: CacheStatistics | None, has_tier: bool
) -> Round:
    """A round, with the statistics of the host cache before and after it."""
    answers = [each.answer for each in checks]
    host_hits = [answer.ttft_seconds for answer in answers if answer.host_hit_tokens]
    no_cache = ttft_without_cache(checks)
    return Round(
        round=number,
        requests=len(checks),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        computed_tokens=sum(answer.computed_tokens for answer in answers),
        device_hit_tokens=sum(answer.device_hit_tokens for answer in answers),
        host_hit_tokens=sum(answer.host_hit_tokens for answer in answers),
        ttft_ms_median=1e3 * median(answer.ttft_seconds for answer in answers),
        ttft_ms_median_host_hit=1e3 * median(host_hits) if host_hits else None,
        ttft_ms_median_no_cache=1e3 * no_cache,
        max_logit_error=max(each.logit_error for each in checks),
        tokens_match=all(each.tokens_match for each in checks),
        bytes_stored=after.bytes_stored - before.bytes_stored if after and before else 0,
        bytes_loaded=after.bytes_loaded - before.bytes_loaded if after and before else 0,
        differences=sum(not each.agrees for each in checks),
        near_ties=sum(not each.agrees and each.near_tie for each in checks),
        tier_hit_tokens=sum(answer.tier_hit_tokens for answer in answers) if has_tier else None,
    )


def ttft_without_cache(checks: Sequence[Check]) -> float:
    """The median time to the first token in the engine without a cache, by the faster way to prefill."""
    return min(median(each.chunked_ttft for each in checks), median(each.one_shot_ttft for each in checks))


def ttft_by_hit(checks: Sequence[Check]) -> dict[str, float | None]:
    """The median time to the first token without a cache, and where most of the prompt was found; None: nowhere."""
    answers = [each.answer for each in checks]
    device = [each.ttft_seconds for each in answers if 2 * each.device_hit_tokens >= each.prompt_tokens]
    host = [each.ttft_seconds for each in answers if 2 * each.host_hit_tokens >= each.prompt_tokens]
    return {
        "no_cache": ttft_without_cache(checks) if checks else None,
        "device_hit": median(device) if device else None,
        "host_hit": median(host) if host else None,
    }
