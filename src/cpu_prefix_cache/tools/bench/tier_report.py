"""Report of `bench --tier`: rates of its slots, and the rate from which on reading saves time.

>>> some = [SlotRate("verified", 2 << 20, "read", 2.5, 90.0), SlotRate("plain", 2 << 20, "read", 3.0, 20.0)]
>>> print(tier_table(some))
slots     method    direction    GB/s  CPU ms/GB  of plain
2048 KiB  verified  read         2.50         90       83%
2048 KiB  plain     read         3.00         20      100%
>>> print(break_even(2.5, bytes_per_token=131_072, prefill_rate=38_000))
a token has 131,072 bytes: at 38,000 tokens/s, reading is faster than computing above 4.98 GB/s
this tier reads 2.50 GB/s: nothing would be read
>>> print(break_even(2.5, bytes_per_token=131_072, prefill_rate=None))
a token has 131,072 bytes: reading this tier saves time where fewer than 19,073 tokens/s are computed
"""

from collections.abc import Sequence
from typing import Any

from cpu_prefix_cache.tools.bench.slot_rates import PLAIN, VERIFIED, SlotRate


def tier_table(rates: Sequence[SlotRate]) -> str:
    plain = {(each.slot_bytes, each.direction): each.gb_per_s for each in rates if each.method == PLAIN}
    lines = ["slots     method    direction    GB/s  CPU ms/GB  of plain"]
    for method, slot_bytes, direction, rate, cpu in rates:
        share = rate / plain[slot_bytes, direction]
        lines.append(f"{slot_bytes >> 10:>4} KiB  {method:<8}  {direction:<9} {rate:7.2f} {cpu:10.0f} {share:9.0%}")
    return "\n".join(lines)


def large(rates: Sequence[SlotRate], direction: str) -> float:
    """The verified rate of the largest slots, in GB/s."""
    verified = [each for each in rates if each.method == VERIFIED and each.direction == direction]
    return max(verified, key=lambda each: each.slot_bytes).gb_per_s


def break_even(read_gb_per_s: float, bytes_per_token: int, prefill_rate: float | None) -> str:
    """Whether reading saves time."""
    a_token = f"a token has {bytes_per_token:,} bytes: "
    if prefill_rate is None:
        most = read_gb_per_s * 1e9 / bytes_per_token
        return f"{a_token}reading this tier saves time where fewer than {most:,.0f} tokens/s are computed"
    even = bytes_per_token * prefill_rate / 1e9
    answer = "long prefixes would be read" if read_gb_per_s > even else "nothing would be read"
    return (
        f"{a_token}at {prefill_rate:,.0f} tokens/s, reading is faster than computing above {even:,.2f} GB/s\n"
        f"this tier reads {read_gb_per_s:.2f} GB/s: {answer}"
    )


def as_json(path: str, rates: Sequence[SlotRate], *, is_direct: bool) -> dict[str, Any]:
    """`replay --below-rate` reads `read_gb_per_s`."""
    return {
        "path": path,
        "is_direct": is_direct,
        "read_gb_per_s": large(rates, "read"),
        "write_gb_per_s": large(rates, "write"),
        "rates": [each._asdict() for each in rates],
    }
