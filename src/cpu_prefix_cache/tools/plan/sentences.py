"""The plan in three sentences: what the knee saves, what lies around it, and what else changes it."""

from cpu_prefix_cache.tools.plan.curves import Curve, shares_of
from cpu_prefix_cache.tools.plan.plan import LEVEL, NO_HOST, Plan, size_name


def sentences(plan: Plan) -> list[str]:
    if not plan.saves:
        return ["No size of host memory saves prefill of this load.", _alone(plan), _otherwise(plan)]
    return [_knee(plan), _around(plan), _otherwise(plan)]


def _knee(plan: Plan) -> str:
    at, worth = plan.looked_at, plan.worth
    size, outcome = plan.sizes[at], plan.preferred.outcomes[at]
    saved = worth.gpus_alone - worth.gpus(outcome)
    money = worth.money(outcome, size)
    left = "" if money is None else f"; that leaves {money:,.0f} a month"
    return (
        f"{size_name(size)} of host memory save {plan.preferred.shares[at]:.1%} of prefill, {saved:.2f} of the "
        f"{worth.gpus_alone:.2f} GPUs that prefill of this load keeps busy{left}."
    )


def _around(plan: Plan) -> str:
    at, shares = plan.looked_at, plan.preferred.shares
    last = len(plan.sizes) - 1
    parts = []
    if at > 0:
        parts.append(f"half of it saves {_points(shares[at] - shares[at - 1])} less")
    if at < last:
        parts.append(f"twice as much adds {_points(shares[at + 1] - shares[at])}")
    level = next(index for index, share in enumerate(shares) if shares[last] - share < LEVEL)
    if plan.knee is None:
        parts.append("the curve still rises there")
    elif level < last:
        parts.append(f"above {size_name(plan.sizes[level])} there is nothing more")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _alone(plan: Plan) -> str:
    shares = shares_of(plan.origins()[NO_HOST])
    return (
        f"The device alone has {shares['device']:.1%} of the tokens of prompts, and the most that any host memory adds "
        f"is {plan.most:.1%} of prefill."
    )


def _otherwise(plan: Plan) -> str:
    at, preferred = plan.looked_at, plan.preferred
    others = [f"{curve.name} {_more(curve, preferred, at)}" for curve in plan.curves if curve is not preferred]
    return f"At {size_name(plan.sizes[at])}, compared with {preferred.name}: {', '.join(others)}."


def _more(curve: Curve, preferred: Curve, at: int) -> str:
    if at >= len(curve.outcomes):
        return "needs more than it has"
    points = curve.shares[at] - preferred.shares[at]
    if abs(points) < LEVEL:
        return "the same"
    return f"{_points(abs(points))} {'more' if points > 0 else 'less'}"


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"
