"""Kernels run in Triton's interpreter here. The variable must be set before they are imported."""

import os

if os.environ.get("COPIER_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
