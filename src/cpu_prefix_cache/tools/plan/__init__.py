"""Plans how much host memory to buy for recorded requests, on one page.

gpus           what a GPU reaches, keeps and loads, where the user measured nothing
curves         the trace on each size that one can buy, by policy, coded, and above a tier
worth          GPUs that a load needs, those that memory saves, and money
setting        options -> what is around the host, and how it keeps blocks
plan           the curves, the preferred one, its knee
sentences      three of them, from the knee
table          what the terminal shows
page drawing   what the HTML file shows
plan_json      what --json writes
plan_command   `cpu-prefix-cache plan`

Replays, rates and money of seconds are those of `tools.replay`; nothing is simulated here.
"""
