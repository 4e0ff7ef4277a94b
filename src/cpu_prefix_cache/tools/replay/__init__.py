"""Replays recorded requests through the cache's own code, to find hit ratios and the time that hits save.

lines              lines of a file, and what is wrong with one
traces             files of requests -> requests with keys, in the order of their timestamps
hints              when each is used again, for policies that take hints
tiers              what they are replayed on: a host, a device before it, a tier below it
one_tier           the host pool alone
replayed_model     a model's KV in blocks that are counted: chunks, and checkpoints
two_tiers          a device pool with the host behind it: CPUPrefixCache, lazy or eager
below              a host, or a device and a host, with a tier below, through the code of `tiers`
clairvoyant        references: an infinite cache, and one that knows the future
at_eviction        a reference for two tiers: every block is stored when the upper evicts it
prefill_work       what it takes to compute tokens, by how deep they are
seconds_saved      what hits save in prefill time, by depth, and in money
outcome            results of replays
replays            any of these tiers -> an outcome
knee               from which size on more memory adds little
describe report    what is printed: above the table, and the table
results_json plot  what is written and drawn
meter              the clock and the progress bar of one replay

replay_command     `cpu-prefix-cache replay`
convert_command    `cpu-prefix-cache convert`: a trace of a server's log
recorded           a trace, or a log of which one is made, for `plan`
options units      shared by the commands; rate_options: rates and a price
capacities         round ones to replay, where none were given

model_config       a model's config.json, looked up by name
named_models       models that are known by their names
layers state_bytes how many layers keep which kind of KV state; the bytes of a recurrent state
models             a configuration -> groups, bytes of a token and of a checkpoint
flops              a configuration -> what a token takes to compute, by itself and for each that it attends to

request_logs       logs of texts, messages or token ids -> prompts with times
tokenizer          texts and messages -> token ids, by the model's own files
"""
