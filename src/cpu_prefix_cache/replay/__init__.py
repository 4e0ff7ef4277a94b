"""Replays recorded requests through the cache's own code, to find hit ratios and the memory that a workload needs.

traces             files of requests -> requests with keys, in the order of their timestamps
tiers              what they are replayed on: a host, a device before it, a tier below it
one_tier           the host pool alone
two_tiers          a device pool with the host behind it: CPUPrefixCache, lazy or eager
below              a host, or a device and a host, with a tier below, through the code of `tiers`
clairvoyant        references: an infinite cache, and one that knows the future
at_eviction        a reference for two tiers: every block is stored when the upper evicts it
seconds_saved      what hits save in prefill time, with given rates
outcome report     results of replays; as JSON, as a table and as a plot
meter              the clock and the progress bar of one replay

replay_command     `cpu-prefix-cache replay`
size_command       `cpu-prefix-cache size`
options units      shared by both commands

model_config       a model's config.json, looked up by name
layers state_bytes how many layers keep which kind of KV state; the bytes of a recurrent state
models             a configuration -> groups, bytes of a token and of a checkpoint
resumable          a host that also keeps the checkpoints that a model needs to resume
sizing             the smallest capacity that reaches a hit ratio
"""
