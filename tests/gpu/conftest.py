"""These tests need a CUDA or HIP device and Triton's compiler. `make test-gpu` runs them and the copiers' contract."""

from pathlib import Path

import pytest
import torch

# no tests; they need vLLM or SGLang, and doctest would import them
collect_ignore = ["damaging.py", "drafters.py", "sglang_damaging.py", "sglang_equality.py", "vllm_equality.py"]

if not torch.cuda.is_available():
    pytest.exit("tests/gpu needs a CUDA or HIP device", returncode=1)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):  # `make test-gpu` collects others beside them
            item.add_marker("gpu")
