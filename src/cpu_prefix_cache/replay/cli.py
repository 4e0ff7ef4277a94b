"""The console command `cpu-prefix-cache`. Each subcommand has a file of its own, with `add_arguments` and `run`."""

import argparse
import sys
from collections.abc import Sequence

from cpu_prefix_cache.errors import PrefixCacheError
from cpu_prefix_cache.replay import replay_command, size_command

NAME = "cpu-prefix-cache"
COMMANDS = (replay_command, size_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 with a sentence on stderr when something that was asked for cannot be done."""
    parser = argparse.ArgumentParser(prog=NAME, description="What a host-memory KV prefix cache would give a workload.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_arguments(subparsers)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except PrefixCacheError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
