"""Everything that speaks to somebody else's software, one package each.

`vllm` translates the calls of an engine and decides nothing. `transformers` is an engine: the smallest honest one.
"""
