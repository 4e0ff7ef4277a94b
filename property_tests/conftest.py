"""One Hypothesis profile for all machines: small pools, many short stories, no clock."""

import os

from hypothesis import HealthCheck, settings

os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported: Triton reads it as it decorates

settings.register_profile(
    "core",
    derandomize="CI" in os.environ,  # a change is judged by what it does, and searched further on its author's machine
    deadline=None,
    report_multiple_bugs=False,
    print_blob=False,
    max_examples=80,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.load_profile("core")
