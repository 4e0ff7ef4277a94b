"""Adapters to other software, one package each.

`vllm` translates vLLM's connector calls and decides nothing. `transformers` is a small engine for Hugging Face models.
"""
