"""Worth of host memory: GPUs that prefill of the load keeps busy, those that hits spare, and money.

    GPUs needed    seconds of prefill and of loads, over the time of the trace, times the GPUs of an engine
    GPUs saved     needed behind the device alone, less those needed with the host
    money a month  engines saved at their price, less the price of the memory, spread over three years

Decode comes on top of both. One replay serves the whole load: where it needs several engines, each has a share of this
memory, and a request must reach the one that has its prefix.
"""

from dataclasses import dataclass

from cpu_prefix_cache.tools.plan.curves import computed_work
from cpu_prefix_cache.tools.replay.outcome import Outcome, Tally
from cpu_prefix_cache.tools.replay.seconds_saved import SECONDS_AN_HOUR, Rates
from cpu_prefix_cache.tools.replay.traces import Trace

GIB = 2**30
HOURS_A_MONTH, MONTHS_OF_MEMORY = 730, 36


@dataclass(frozen=True, slots=True)
class Worth:
    """`alone` has the hits of the device without a host, `rates` the price of an engine, which has `engine_gpus`."""

    trace: Trace
    rates: Rates
    alone: Tally
    engine_gpus: int
    gib_price: float = 0.0

    @property
    def has_price(self) -> bool:
        return self.rates.gpu_price is not None

    @property
    def gpus_alone(self) -> float:
        """GPUs that prefill needs without host memory."""
        return self._gpus(self.rates.seconds(computed_work(self.alone, self.trace)))

    def gpus(self, outcome: Outcome) -> float:
        """GPUs that prefill and loads need."""
        tally = outcome.tally
        loads = self.rates.seconds(tally.loaded) - (outcome.seconds_saved or 0.0)
        return self._gpus(self.rates.seconds(computed_work(tally, self.trace)) + loads)

    def money(self, outcome: Outcome, size: int) -> float | None:
        """Money a month that stays, once the memory is paid; None without a price of GPUs."""
        engines = (self.gpus_alone - self.gpus(outcome)) / self.engine_gpus
        an_hour = self.rates.money(engines * SECONDS_AN_HOUR)
        return None if an_hour is None else an_hour * HOURS_A_MONTH - size / GIB * self.gib_price / MONTHS_OF_MEMORY

    def _gpus(self, seconds: float) -> float:
        return seconds / span(self.trace) * self.engine_gpus


def span(trace: Trace) -> float:
    """Seconds from the first request to the last."""
    return trace.requests[-1].now - trace.requests[0].now
