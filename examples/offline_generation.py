"""Offline generation that loads shared prefixes from host memory.

Asks questions about documents in several rounds, with a device pool too small for all documents: what the device
evicted in one round is loaded from the host in the next. Every answer is compared with that of the same engine without
a cache. Run it without options, or see --help.

With --tier file:PATH:SIZE, what host memory cannot hold is kept in files in the folder PATH, and a second run finds the
prefixes of the first.

Exit status: 0 all answers agree (in half precision differences are allowed, and printed); 1 they do not; 2 it cannot be
done, and one sentence gives the reason; 3 with --corrupt, if there was nothing to corrupt or the damage was not
detected; 130 interrupted. However a run ends, the rounds that finished are printed, and written to --json.

    offline_generation.py            this file: how a run ends
    offline_generation_run.py        a run: two engines, with and without the cache, answer the same prompts
    offline_generation_options.py    the options
    offline_generation_inputs.py     the model, its tokenizer and the prompts
    offline_generation_checks.py     an answer compared with that of the other engine; a damaged piece
    offline_generation_report.py     what is printed and written
"""

import sys
from collections.abc import Sequence

FAILED, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    try:
        return _run(argv)
    except ModuleNotFoundError as error:
        return _failed(f"{error.name} is not installed: run `make demo`, or `pip install -e '.[transformers]'`")
    except MemoryError:
        return _failed("there is not enough memory on this machine for that")
    except KeyboardInterrupt:
        return _failed("interrupted: the rounds that finished are above", INTERRUPTED)


def _run(argv: Sequence[str] | None) -> int:
    """Imports what takes seconds to import, or may not be installed, so that `main` speaks for the imports, too."""
    from cpu_prefix_cache import PrefixCacheError
    from offline_generation_run import run

    try:
        return run(argv)
    except PrefixCacheError as error:
        return _failed(str(error))


def _failed(sentence: str, status: int = FAILED) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
