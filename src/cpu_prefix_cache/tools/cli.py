"""The console command `cpu-prefix-cache`. Each subcommand has a file of its own, with `add_arguments` and `run`."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from cpu_prefix_cache import __version__
from cpu_prefix_cache.messages.errors import PrefixCacheError
from cpu_prefix_cache.tools.bench import bench_command
from cpu_prefix_cache.tools.keep import keep_command
from cpu_prefix_cache.tools.plan import plan_command
from cpu_prefix_cache.tools.replay import convert_command, replay_command

NAME = "cpu-prefix-cache"
COMMANDS = (plan_command, replay_command, bench_command, convert_command, keep_command)
EPILOG = """\
examples:
  cpu-prefix-cache plan TRACE --model config.json --gpu h200           how much memory to buy: curve, knee, GPUs saved
  cpu-prefix-cache plan server.log --model qwen3-32b --gpu h200 --gpu-price 3 --html plan.html      and as a page
  cpu-prefix-cache replay TRACE --model config.json --capacity 64GiB   which policy, with that much?
  cpu-prefix-cache replay TRACE --model config.json --tflops 600 --gpu-price 3      what does it save?
  cpu-prefix-cache convert requests.jsonl --tokenizer FOLDER --out TRACE            a trace of your own server
  cpu-prefix-cache bench                                               how fast are copies on this machine?
  cpu-prefix-cache keep --host-bytes 512GiB --socket /run/kv/kv.sock   one pool for the engines of this node

docs: docs/traces.md (how to get a trace), docs/policies.md (which policy), docs/tiers.md (a disk below host memory)
"""
FAILED, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or not 0 with a sentence on stderr when a command cannot be carried out.

    Without arguments it prints the help.
    """
    given = sys.argv[1:] if arguments is None else arguments
    args = parser().parse_args(given or ["--help"])
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


class _Once(argparse.Action):
    """Stores the value of an option, and refuses a second one, which would silently take the place of the first."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        given: set[str] = vars(namespace).setdefault("given", set())
        if option is not None and self.dest in given:
            parser.error(f"{option} was given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """Prints an error in one sentence, without the usage. An option that takes a value is given once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("action", None, _Once)

    def error(self, message: str) -> NoReturn:
        self.exit(FAILED, f"{self.prog}: {message} (--help lists the options)\n")


def parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=NAME,
        description="What a host-memory KV prefix cache would give you.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{NAME} {__version__}")
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
    """Sends later output nowhere, or Python would try again at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _failed(f"cannot print: {error.strerror}")


if __name__ == "__main__":
    sys.exit(main())
