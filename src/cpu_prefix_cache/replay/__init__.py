"""Replays recorded requests through the code that serves, and says how much memory a workload is worth.

traces             files of requests -> requests with keys, in the order of their timestamps
tiers              what they are replayed on: a host, and perhaps a device before it
one_tier           the host pool alone
two_tiers          a device pool with the host behind it: CPUPrefixCache, lazy or eager
clairvoyant        references: an infinite cache, and one that knows the future
at_eviction        a reference for two tiers: everything stored at the very moment it leaves the device
outcome report     what came of a replay; as JSON, as a table and as a plot
meter              the clock and the progress bar of one replay

replay_command     `cpu-prefix-cache replay`
size_command       `cpu-prefix-cache size`
options units      what they share

model_config       a model's config.json, looked up by name
layers state_bytes how many layers keep which kind of KV state; what a recurrent state weighs
models             a configuration -> groups, bytes of a token and of a checkpoint
resumable          a host that keeps the checkpoints, too, that a model needs to resume
sizing             the smallest capacity that reaches a hit ratio
"""
