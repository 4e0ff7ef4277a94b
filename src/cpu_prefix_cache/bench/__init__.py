"""Measures the copies of this machine: which share of its link they reach.

measure        rates of the link, of staged and of direct copies, for some sizes
rates          a rate, and many of them as a table and as a plot

bench_command  `cpu-prefix-cache bench`
"""
