"""Kernels run in Triton's interpreter here. It must be said before they are imported."""

import os

if os.environ.get("COPIER_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
