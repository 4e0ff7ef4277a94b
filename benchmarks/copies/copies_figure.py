"""Draws the rates that copies.py measured: GB/s over fragment size for each method, and the limit.

python -m benchmarks.copies.copies_figure rates.csv figure.png [--host-blocks random]
"""

import argparse
import csv

from cpu_prefix_cache.tools.bench.rates import Rate, draw

TITLES = {"random": "host blocks of 2 MiB at random", "pool": "host blocks of 256 KiB as the pool hands them out"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("rates", help="the file that copies.py --csv wrote")
    parser.add_argument("figure")
    parser.add_argument("--host-blocks", choices=TITLES, default="random")
    parser.add_argument("--title", default="", help="for example the machine")
    options = parser.parse_args()
    with open(options.rates, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["host_blocks"] == options.host_blocks]
    rates = [Rate(row["method"], int(row["fragment_bytes"]), row["direction"], float(row["gb_per_s"])) for row in rows]
    limits = {row["direction"]: float(row["link_gb_per_s"]) for row in rows}
    draw(options.figure, ", ".join(filter(None, (options.title, TITLES[options.host_blocks]))), rates, limits)


if __name__ == "__main__":
    main()
