"""Every test here imports ATOM as `source.py` finds it, the real one or its double.

Kernels run in Triton's interpreter. It must be told so before anything imports it, as ATOM does.
"""

import os

if os.environ.get("COPIER_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from tests_engines.atom import source  # noqa: F401

collect_ignore = ["engine.py", "mends.py", "simulation.py"]  # they import the real one
