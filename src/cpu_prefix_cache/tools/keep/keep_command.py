"""`cpu-prefix-cache keep`: one pool of host memory for the engines of this node.

Engines of this user that are given the socket share what they compute, if they have the same model, revision and layout
(docs/keeper.md). The memory is taken as engines write to it, and counts for the control group of the engine that comes
first. With --below, files or a store have what engines have stored, also when all of them and the keeper have ended.
The keeper needs neither torch nor a GPU. SIGTERM ends it; engines go on, and hand the memory to the next keeper at this
socket.
"""

import argparse
import logging
import signal
import sys

from cpu_prefix_cache.memory.limits import check_fits
from cpu_prefix_cache.messages.sizes import parse_bytes
from cpu_prefix_cache.node.metrics_page import listening
from cpu_prefix_cache.node.server import ADOPT_SECONDS, SETTLE_SECONDS, Server
from cpu_prefix_cache.stores.dialect import parse_tier


def add_arguments(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "keep",
        help="one pool of host memory for the engines of a node",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host-bytes", required=True, metavar="SIZE", help="size of the pool, such as 512GiB")
    parser.add_argument(
        "--socket", required=True, metavar="PATH", help="where engines connect, such as /run/kv/kv.sock"
    )
    parser.add_argument(
        "--below",
        metavar="TIER",
        help="a tier that outlives keeper and engines: files, such as file:/nvme/kv:2TiB, at least twice the pool, in "
        "a folder that is there; or a store that machines share, such as redis://cache:6379 (default: none)",
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="show metrics there, for Prometheus, such as 0.0.0.0:9400 (default: nowhere)",
    )
    parser.add_argument(
        "--adopt-seconds",
        type=float,
        default=ADOPT_SECONDS,
        metavar="S",
        help="how long to wait for what engines of an earlier keeper hand back (default %(default)s)",
    )
    parser.add_argument(
        "--settle-seconds",
        type=float,
        default=SETTLE_SECONDS,
        metavar="S",
        help="how long after the end of an engine its device may still write (default %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    host_bytes = parse_bytes(args.host_bytes)
    check_fits(host_bytes)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    metrics = None if args.metrics is None else listening(args.metrics)
    server = Server(
        args.socket,
        host_bytes,
        adopt_seconds=args.adopt_seconds,
        settle_seconds=args.settle_seconds,
        below=None if args.below is None else parse_tier(args.below),
        metrics=metrics,
    )
    server.end_by(signal.SIGTERM)
    shown = "" if metrics is None else f", metrics at port {metrics.getsockname()[1]}"
    print(f"keeping {args.host_bytes} at {args.socket}{shown}", flush=True)
    try:
        server.serve()
    finally:
        server.close()
    return 0
