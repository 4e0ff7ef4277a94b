"""Measures copies on this machine, as a share of the rate of its link, and files of a tier.

measure        rates of the link, and of staged and direct copies with fragments of several sizes
rates          a rate, and tables and plots of rates
file_rates     rates of slots in a file, with checksums and without
tier_report    tables and sentences of these

tier_bench     `cpu-prefix-cache bench --tier`
bench_command  `cpu-prefix-cache bench`
"""
