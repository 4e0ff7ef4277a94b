"""Measures copies on this machine, as a share of the rate of its link.

measure        rates of the link, and of staged and direct copies with fragments of several sizes
rates          a rate, and tables and plots of rates

bench_command  `cpu-prefix-cache bench`
"""
