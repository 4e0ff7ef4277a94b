"""Measures copies on this machine, as a share of the rate of its link, and the slots of a tier.

measure        rates of the link, and of staged and direct copies with fragments of several sizes
rates          a rate, and tables and plots of rates
slot_rates     rates of slots, with checksums and without
file_rates     slots in a file
store_rates    slots in a store that machines share
tier_report    tables and sentences of these

tier_bench     `cpu-prefix-cache bench --tier`
bench_command  `cpu-prefix-cache bench`
"""
