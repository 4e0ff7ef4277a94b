"""Text for the terminal: savings by size, and where tokens came from."""

from cpu_prefix_cache.tools.plan.curves import Curve, shares_of
from cpu_prefix_cache.tools.plan.plan import ENOUGH, NO_HOST, Plan, size_name
from cpu_prefix_cache.tools.replay.report import aligned

DEVICE_NOTE = "Hits of the device alone are no savings of the host."
GPUS_NOTE = "GPUs: what prefill and loads keep busy; decode comes on top."
ENGINES_NOTE = (
    "This load is for several engines: the sizes are of all of them together, the device is that of one "
    "(--device-capacity), and a request must reach the engine with its prefix."
)
MONEY_NOTE = "Money is saved only where GPUs are given back."


def savings(plan: Plan) -> list[list[str]]:
    """Head and rows: shares of prefill saved by each curve, then GPUs and money of the preferred policy."""
    worth, names = plan.worth, [curve.name for curve in plan.curves]
    rows = [
        ["host", *names, "GPUs", "saved", "money a month"],
        [NO_HOST, *("-" for _ in names), f"{worth.gpus_alone:.2f}", "-", "-"],
    ]
    for at, (size, outcome) in enumerate(zip(plan.sizes, plan.preferred.outcomes, strict=True)):
        gpus, money = worth.gpus(outcome), worth.money(outcome, size) or 0.0
        shares = [_share(curve, at) for curve in plan.curves]
        rows.append([size_name(size), *shares, f"{gpus:.2f}", f"{worth.gpus_alone - gpus:.2f}", f"{money:,.0f}"])
    return rows if worth.has_price else [row[:-1] for row in rows]


def marks(plan: Plan) -> list[str]:
    """A mark for each row of `savings`, mostly empty."""
    named = {"the knee": plan.knee, f"{ENOUGH:.0%} of all": plan.enough, "most money": plan.most_money}
    sizes = range(len(plan.sizes))
    return ["", "", *(", ".join(name for name, marked in named.items() if marked == at) for at in sizes)]


def origins(plan: Plan) -> list[list[str]]:
    """Head and rows: shares of all tokens by where they came from."""
    found = {name: shares_of(origins) for name, origins in plan.origins().items()}
    head = ["host", *found[NO_HOST]]
    return [head, *([name, *(f"{share:.1%}" for share in shares.values())] for name, shares in found.items())]


def notes(plan: Plan) -> list[str]:
    texts = {
        DEVICE_NOTE: True,
        GPUS_NOTE: True,
        ENGINES_NOTE: plan.worth.gpus_alone > plan.worth.engine_gpus,
        MONEY_NOTE: plan.worth.has_price,
    }
    return [text for text, is_shown in texts.items() if is_shown]


def tables(plan: Plan) -> str:
    lines = [
        f"{line}  <- {mark}" if mark else line
        for line, mark in zip(aligned(savings(plan)).splitlines(), marks(plan), strict=True)
    ]
    return "\n".join(
        [
            f"prefill time saved by the host, and GPUs that stay busy with {plan.preferred.name}:",
            *lines,
            *notes(plan),
            "",
            f"tokens of prompts with {plan.deepest.name}, by where they came from:",
            aligned(origins(plan)),
        ]
    )


def _share(curve: Curve, at: int) -> str:
    return f"{curve.shares[at]:.1%}" if at < len(curve.outcomes) else "-"
