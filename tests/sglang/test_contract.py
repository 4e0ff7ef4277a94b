"""Names of SGLang that the connector reads and overrides are there in the release here; without them it is refused."""

import ast
import json
from inspect import getsource, isabstract
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang

from connector.sglang import HostLinker, interface, linker, pools, ranks
from cpu_prefix_cache import ConfigurationError

CONTRACT = json.loads(json.dumps(interface.CONTRACT))  # a copy
OURS = (linker, pools, ranks)


def test_the_release_is_the_one_whose_contract_is_kept():
    assert sglang.__version__ == interface.TESTED
    assert list(interface.lacking()) == []


def test_every_call_of_a_linker_is_answered():
    assert not isabstract(HostLinker)
    assert set(CONTRACT["calls"]) <= set(vars(HostLinker))


@pytest.mark.parametrize("module", OURS, ids=lambda module: Path(module.__file__).stem)
def test_the_contract_has_each_name_of_sglang_that_is_imported(module):
    tree = ast.parse(getsource(module))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("sglang")]
    names = {f"{node.module}.{alias.name}" for node in found for alias in node.names}
    assert names <= {CONTRACT["linker"], *CONTRACT["members"]}


@pytest.mark.parametrize("name", CONTRACT["members"])
def test_a_member_that_is_gone_is_named(monkeypatch, name):
    members = {**CONTRACT["members"], name: [*CONTRACT["members"][name], "never_there"]}
    monkeypatch.setattr(interface, "CONTRACT", {**CONTRACT, "members": members})
    with pytest.raises(ConfigurationError, match=rf"has no {name}.never_there: take SGLang 0\.5\.23"):
        interface.check_interface()


def test_a_member_that_is_only_read_or_written_about_is_none():
    source = '''
    class Pool:
        """Has `gone`, once."""
        field: int

        def method(self):
            self.kept = self.gone  # gone
    '''
    assert set(interface._bound(source)) == {"field", "method", "kept"}


@pytest.mark.parametrize("name", [*CONTRACT["members"], CONTRACT["linker"]])
def test_a_class_that_is_gone_is_named(monkeypatch, name):
    found = interface._found
    monkeypatch.setattr(interface, "_found", lambda each: None if each == name else found(each))
    with pytest.raises(ConfigurationError, match=f"has no {name}"):
        interface.check_interface()


@pytest.mark.parametrize("change", ["another parameter", "another call"])
def test_another_linker_is_refused(monkeypatch, change):
    calls = dict(CONTRACT["calls"])
    if change == "another call":
        calls["one_more"] = ["self"]
    else:
        calls["load"] = ["self", "rid", "transfers", "priority"]
    monkeypatch.setattr(interface, "CONTRACT", {**CONTRACT, "calls": calls})
    with pytest.raises(ConfigurationError, match="UnifiedCacheLinker with the calls"):
        interface.check_interface()


def test_another_release_that_keeps_the_contract_runs_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(interface, "sglang", SimpleNamespace(__version__="0.5.99"))
    interface.check_interface()
    assert "this is 0.5.99" in caplog.text
