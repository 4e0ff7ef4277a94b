"""Names of SGLang that the connector reads and overrides are there in the release here; without them it is refused."""

import ast
from inspect import getsource, isabstract, signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from connector.common.contract import bound, lacking
from connector.sglang import HostLinker, interface, linker, pools, ranks
from cpu_prefix_cache import ConfigurationError
from tests.sglang.engine import Engine, server_args
from tests.sglang.models import KINDS

CONTRACT = dict(interface.CONTRACT)
LINKER = f"{UnifiedCacheLinker.__module__}.{UnifiedCacheLinker.__name__}"
OURS = (linker, pools, ranks)


def test_the_release_is_the_one_whose_contract_is_kept():
    assert sglang.__version__ == interface.TESTED
    assert list(lacking(CONTRACT)) == []


def test_every_call_of_a_linker_is_answered():
    assert not isabstract(HostLinker)
    for call in CONTRACT[LINKER]:
        name = call.partition("(")[0]
        assert f"{name}({', '.join(signature(vars(HostLinker)[name]).parameters)})" == call


def test_the_contract_has_every_call_of_a_linker():
    assert {call.partition("(")[0] for call in CONTRACT[LINKER]} == UnifiedCacheLinker.__abstractmethods__


@pytest.mark.parametrize("module", OURS, ids=lambda module: Path(module.__file__).stem)
def test_the_contract_has_each_name_of_sglang_that_is_imported(module):
    tree = ast.parse(getsource(module))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("sglang")]
    names = {f"{node.module}.{alias.name}" for node in found for alias in node.names}
    assert names <= CONTRACT.keys()


@pytest.mark.parametrize("name", CONTRACT)
def test_a_member_that_is_gone_is_named(monkeypatch, name):
    monkeypatch.setattr(interface, "CONTRACT", {**CONTRACT, name: [*CONTRACT[name], "never_there"]})
    with pytest.raises(ConfigurationError, match=rf"has no {name}.never_there: take SGLang 0\.5\.23"):
        interface.check_interface()


def test_a_member_that_is_only_read_or_written_about_is_none():
    source = '''
    class Pool:
        """Has `gone`, once."""
        field: int

        def method(self, given, *, named=None):
            self.kept = self.gone  # gone
    '''
    assert set(bound(source)) == {"field", "method", "method(self, given, named)", "kept"}


@pytest.mark.parametrize("gone", ["class", "module"])
@pytest.mark.parametrize("name", CONTRACT)
def test_a_class_that_is_gone_is_named(monkeypatch, name, gone):
    module, _, owner = name.rpartition(".")
    missing = f"{module}.No{owner}" if gone == "class" else f"{module}_gone.{owner}"
    monkeypatch.setattr(interface, "CONTRACT", {**CONTRACT, missing: CONTRACT[name]})
    with pytest.raises(ConfigurationError, match=f"has no {missing}"):
        interface.check_interface()


@pytest.mark.parametrize("call", ["one_more(self)", "load(self, rid, transfers, priority)", "close()"])
def test_another_linker_is_refused(monkeypatch, call):
    monkeypatch.setattr(interface, "CONTRACT", {**CONTRACT, LINKER: [*CONTRACT[LINKER], call]})
    with pytest.raises(ConfigurationError) as refused:
        interface.check_interface()
    assert f"UnifiedCacheLinker.{call}: take SGLang" in str(refused.value)


def test_a_call_that_is_not_answered_is_refused_by_sglang(monkeypatch):
    monkeypatch.setattr(HostLinker, "__abstractmethods__", frozenset({"one_more"}))
    with (
        server_args(host_bytes="1MiB") as args,
        pytest.raises(ValueError, match=r"must implement all .*\['one_more'\]"),
    ):
        Engine(args, KINDS["full"])


def test_another_release_that_keeps_the_contract_runs_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(interface, "sglang", SimpleNamespace(__version__="0.5.99"))
    interface.check_interface()
    assert "this is 0.5.99" in caplog.text
