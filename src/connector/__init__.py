"""Adapters to other software, one package each.

`vllm` and `atom` translate the connector calls of these engines and decide nothing; `tier` is what they share of a tier
of files. `multi` chooses among several caches of one engine. `transformers` is a small engine for Hugging Face models.
"""
