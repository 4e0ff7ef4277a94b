"""These tests need a CUDA device and Triton's compiler. `make test-gpu` runs them, with the contract of copiers."""

import pytest
import torch

collect_ignore = ["damaging.py", "vllm_equality.py"]  # no tests; they need vLLM, and doctest would import them

if not torch.cuda.is_available():
    pytest.exit("tests_gpu needs a CUDA device", returncode=1)
