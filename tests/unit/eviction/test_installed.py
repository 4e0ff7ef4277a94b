"""A policy by its name: a third party's by entry point, and the sentence where there is none."""

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import BlockPool
from cpu_prefix_cache.eviction import EvictionPolicy, Lru, policy_of
from cpu_prefix_cache.eviction.installed import GROUP
from cpu_prefix_cache.tools.cli import main
from property_tests.strategies import chain
from tests.support.packages import install
from tests.unit.eviction.example_policy import KeepsFirst

EXAMPLE = "tests.unit.eviction.example_policy:KeepsFirst"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    return lambda **points: install(tmp_path, monkeypatch, GROUP, points)


@pytest.fixture
def trace(tmp_path):
    """Two prompts in turn, of two blocks each."""
    file = tmp_path / "trace.jsonl"
    lines = [
        f'{{"timestamp": {1000 * at}, "input_length": 1024, "output_length": 1, "hash_ids": [{first}, {first + 1}]}}\n'
        for at, first in enumerate([1, 3] * 4)
    ]
    file.write_text("".join(lines))
    return str(file)


def test_a_third_party_has_an_entry_point(installed):
    installed(keeps_first=EXAMPLE, lru=EXAMPLE)
    assert policy_of("keeps_first") is KeepsFirst
    assert policy_of("lru") is Lru  # which is ours, whatever is installed


@pytest.mark.parametrize(("policy", "wanted"), [("keeps_first", 1), ("lru", 3)])
def test_the_pool_follows_an_installed_policy(installed, policy, wanted):
    installed(keeps_first=EXAMPLE)
    pool = BlockPool(3, policy)
    pool.commit(pool.allocate(2), chain("ab"), pool.root, pool.touch(None))
    assert pool.choose(pool.root, chain("xyz")) == wanted
    pool.check_valid()


def test_the_command_takes_it(installed, trace, capsys):
    installed(keeps_first=EXAMPLE)
    assert main(["replay", trace, "--policy", "lru,keeps_first", "--capacity", "2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    ratio = {row[0]: float(row[2]) for row in rows if row and row[0] in ("lru", "keeps_first")}
    assert ratio == {"lru": 0.0, "keeps_first": 0.375}  # three of the four times the first prompt comes, of eight
    assert main(["replay", trace, "--policy", "mru"]) == 2
    assert "known are lru, arc, adaptive, min, keeps_first, and adaptive@N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("no_such_package:Policy", "other cannot be imported: No module named 'no_such_package'"),
        ("tests.support.packages:Policy", "other cannot be imported: .* has no attribute 'Policy'"),
        ("builtins:str", "builtins:str, which policy other names, is no EvictionPolicy"),
        ("tests.support.packages:install", "is no EvictionPolicy"),
    ],
)
def test_an_entry_point_without_a_policy_is_refused(installed, value, sentence):
    installed(other=value)
    with pytest.raises(ConfigurationError, match=sentence):
        BlockPool(3, "other")


class Declines(KeepsFirst):
    """A policy that knows no `choose`."""

    choose = EvictionPolicy.choose

    def accepts(self, parent, incoming, count, margin=1.0):
        return 0


class DeclinesInBoth(Declines):
    choose = KeepsFirst.choose


def test_a_policy_of_an_older_contract_is_refused(installed):
    installed(old=f"{__name__}:Declines", both=f"{__name__}:DeclinesInBoth")
    with pytest.raises(ConfigurationError, match="policy old names, has `accepts` and no `choose`"):
        BlockPool(3, "old")
    assert policy_of("both") is DeclinesInBoth


class TakesNoHint(KeepsFirst):
    def admitted(self, deepest, keys, now):
        return super().admitted(deepest, keys, now)


def test_a_policy_that_takes_no_hint_is_refused(installed):
    installed(old=f"{__name__}:TakesNoHint")
    with pytest.raises(ConfigurationError, match="policy old names, takes no `next_use` in `admitted`: add the"):
        BlockPool(3, "old")


def test_an_unknown_name_is_refused_with_those_installed(installed):
    installed(keeps_first=EXAMPLE)
    with pytest.raises(ConfigurationError, match=r"one of adaptive, arc, lru, keeps_first; got 'mru'.*entry points of"):
        policy_of("mru")
