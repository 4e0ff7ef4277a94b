"""Output of `plan --json`, behind what all commands begin with (`replay/results_json.py`)."""

from typing import Any

from cpu_prefix_cache.tools.plan.curves import Curve
from cpu_prefix_cache.tools.plan.plan import Plan
from cpu_prefix_cache.tools.plan.sentences import sentences
from cpu_prefix_cache.tools.replay.outcome import Outcome
from cpu_prefix_cache.tools.replay.results_json import ratios, saved


def as_json(plan: Plan) -> dict[str, Any]:
    def size(at: int | None) -> int | None:
        return None if at is None else plan.sizes[at]

    return {
        "sentences": sentences(plan),
        "preferred": plan.preferred.name,
        "knee_bytes": size(plan.knee),
        "enough_bytes": size(plan.enough),
        "most_money_bytes": size(plan.most_money),
        "prefill_share_saved_without_limit": plan.most,
        "gpus_without_host": plan.worth.gpus_alone,
        "results": [_curve(plan, curve) for curve in plan.curves],
        "tokens_by_origin": plan.origins(),
    }


def _curve(plan: Plan, curve: Curve) -> dict[str, Any]:
    points = zip(plan.sizes, curve.outcomes, strict=False)  # fewer outcomes where the tier is too small
    return {
        "policy": curve.policy,
        "variant": curve.variant or None,
        "points": [_point(plan, size, outcome) for size, outcome in points],
    }


def _point(plan: Plan, size: int, outcome: Outcome) -> dict[str, Any]:
    return {
        "capacity_bytes": size,
        **ratios(outcome.ratios),
        **saved(outcome.seconds_saved, outcome.share_saved, outcome.money_saved),
        "gpus": plan.worth.gpus(outcome),
        "money_a_month": plan.worth.money(outcome, size),
    }
