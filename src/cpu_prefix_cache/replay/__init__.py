"""Replays recorded requests through the code that serves, and says how much memory a workload is worth.

traces             files of requests -> requests with keys, in the order of their timestamps
one_tier           the host pool alone
two_tiers          a device pool with the host behind it: CPUPrefixCache, lazy or eager
clairvoyant        references: an infinite cache, and one that knows the future
at_eviction        a reference for two tiers: everything stored at the very moment it leaves the device
outcome report     what came of a replay; as JSON, as a table and as a plot
replay_command cli `cpu-prefix-cache replay`
"""
