"""Kernels run in Triton's interpreter here. It must be said before they are imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
