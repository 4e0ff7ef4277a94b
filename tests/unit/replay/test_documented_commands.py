"""Every command that the help and the pages show has only options that exist, with values that can be read."""

import re
import shlex
from pathlib import Path

import pytest

from cpu_prefix_cache.tools import cli

ROOT = Path(__file__).parents[3]
PAGES = ("README.md", "docs/policies.md", "docs/traces.md", "docs/tiers.md", "docs/sizing.md", "docs/vllm.md")


def commands(text):
    """In lines of their own or between backticks, up to the words that follow after several blanks."""
    for found in re.findall(r"(?m)(?:^|`|\$ | {2})(cpu-prefix-cache (?:plan|replay|convert|bench) [^`\n]+)", text):
        yield re.split(r"\s{2,}", found)[0]


SHOWN = {each for page in PAGES for each in commands((ROOT / page).read_text())} | set(commands(cli.EPILOG))


@pytest.mark.parametrize("command", sorted(SHOWN))
def test_its_options_exist(command):
    name, *arguments = shlex.split(command.replace("$S", "TRACE").replace("$A", "TRACE"))
    assert name == cli.NAME and cli.parser().parse_args(arguments).run


def test_there_are_some_of_each_kind():
    assert {command.split()[1] for command in SHOWN} == {"plan", "replay", "convert", "bench"}
    assert len(SHOWN) > 12


def test_an_option_that_does_not_exist_would_be_noticed():
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["replay", "TRACE", "--tera-flops", "600"])
