"""How ATOM finds the connector. ATOM has no plugins, so the program that starts it registers the connector.

    python -m connector.atom.serve --model MODEL ...    ATOM's own server, with the connector registered

or, in a program of your own, at the top level of its main module:

    from connector.atom.plugin import register
    register()

ATOM spawns its processes, and each of them imports the main module of the program again. So what stands there at the
top level, and not under `if __name__ == "__main__"`, runs in the engine's process and on every rank.

ATOM gives a connector's scheduler side its config and nothing else, and this one must see the block pool. `register`
therefore extends `Scheduler.__init__`: when it has ended, a connector of ours gets the block manager. And it extends
`KVOutputAggregator.aggregate`, for the ranks' reports of their tiers (unjoined.py).
"""

from functools import wraps
from inspect import signature
from typing import Any

from atom.kv_transfer.disaggregation.aggregator import KVOutputAggregator
from atom.kv_transfer.disaggregation.factory import KVConnectorFactory
from atom.model_engine.scheduler import Scheduler
from atom.model_engine.sequence import Sequence

from connector.atom.geometry import CHANNEL
from connector.atom.scheduler import CPUPrefixCacheScheduler
from connector.atom.touched import SCHEDULER, check_names, check_sequence
from connector.atom.unjoined import passing_on

# Kind of connector. Releases of ATOM read some of these.
TRAITS = {
    "requires_pd_staging": False,  # it sends nothing to other instances
    "offload": True,
    "reads_block_regions": True,  # what is in no tensor of a layer is in a region (tensors.py)
}

_extended: list[type] = []


def register() -> None:
    """Make `{"kv_connector": "cpu_prefix_cache"}` known to ATOM in this process. A second call changes nothing."""
    known = signature(KVConnectorFactory.register).parameters
    KVConnectorFactory.register(
        CHANNEL,
        worker_module="connector.atom.worker",
        worker_class="CPUPrefixCacheWorker",
        scheduler_module="connector.atom.scheduler",
        scheduler_class="CPUPrefixCacheScheduler",
        **{name: value for name, value in TRAITS.items() if name in known},
    )
    if Scheduler not in _extended:
        _extended.append(Scheduler)
        Scheduler.__init__ = _binding(Scheduler.__init__)
        KVOutputAggregator.aggregate = passing_on(KVOutputAggregator.aggregate)


def _binding(init: Any) -> Any:
    """`Scheduler.__init__`, after which a connector of ours knows the scheduler's blocks."""

    @wraps(init)
    def init_and_bind(scheduler: Any, *arguments: Any, **options: Any) -> None:
        init(scheduler, *arguments, **options)
        check_names(scheduler, SCHEDULER)
        if isinstance(scheduler.kv_connector, CPUPrefixCacheScheduler):
            check_sequence(Sequence, scheduler.block_manager.block_size)
            scheduler.kv_connector.bind(scheduler.block_manager, scheduler.waiting)

    return init_and_bind
