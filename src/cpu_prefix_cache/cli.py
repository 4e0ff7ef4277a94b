"""The console command `cpu-prefix-cache`. Each subcommand has a file of its own, with `add_arguments` and `run`."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from cpu_prefix_cache.bench import bench_command
from cpu_prefix_cache.messages.errors import PrefixCacheError
from cpu_prefix_cache.replay import replay_command, size_command

NAME = "cpu-prefix-cache"
COMMANDS = (replay_command, size_command, bench_command)
FAILED, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or not 0 with a sentence on stderr when something that was asked for cannot be done."""
    args = _parser().parse_args(arguments)
    try:
        _check_stdout()
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except PrefixCacheError as error:
        return _failed(str(error))
    except MemoryError:
        return _failed("not enough memory on this machine for that")
    except OSError as error:  # files are opened by those who say which one it was: this is what is printed
        return _failed_to_print(error)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=NAME, description="What a host-memory KV prefix cache would give you.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_arguments(subparsers)
    return parser


def _check_stdout() -> None:
    """It must be there, and print any name of a file, whatever its encoding."""
    if sys.stdout is None:
        raise PrefixCacheError("stdout is closed: there is nowhere to print to")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _failed(sentence: str, code: int = FAILED) -> int:
    print(f"{NAME}: {sentence}", file=sys.stderr)
    return code


def _failed_to_print(error: OSError) -> int:
    """What is still to be printed goes nowhere, or Python would try again at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _failed(f"cannot print: {error.strerror}")


if __name__ == "__main__":
    sys.exit(main())
