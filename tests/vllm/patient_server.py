"""vLLM's server whose requests wait for a tier or a keeper as long as it takes: the machine of a test may be busy.

vLLM starts its engine in a process that imports this module, too, so the deadlines hold there.
"""

from cpu_prefix_cache.keeper import questions, takes
from cpu_prefix_cache.tiers import promotions
from tests.vllm.real_engine import PATIENCE

if __name__ in ("__main__", "__mp_main__"):  # not where pytest looks for doctests
    promotions.PENDING_GRACE_SECONDS = questions.ASK_SECONDS = takes.TAKE_SECONDS = PATIENCE

if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
