"""The double of ATOM's classes has the names, fields, defaults and signatures of the real ones, and does the same.

The real files are read from the archive of ATOM's source; without it these comparisons are skipped. What the double
does is tested on both, where both are there.
"""

import ast
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.engines.atom import source
from tests.engines.atom.double.atom.kv_transfer.disaggregation import types as double_types

DOUBLE = Path(__file__).parent / "double"
PLACE = "atom/kv_transfer/disaggregation"

# Between instances, not between device and host: what the double does not have.
LEFT_OUT = {
    f"{PLACE}/types.py": {
        "ReqMeta",
        "RemoteAllocInfo",
        "RemoteMeta",
        "ConnectorMetadata._build_req_meta",
        "ConnectorMetadata.add_new_req_to_save",
        "ConnectorMetadata.add_new_req_to_recv",
        "KVConnectorOutput.__repr__",
    },
}


def real(path):
    if source.source() is None:
        pytest.skip(source.why_not_real())
    return (source.unpacked() / path).read_text()


def members(source):
    """Declarations of a file: "Class.method" and functions with their signatures, fields with their defaults."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = signature(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = [ast.unparse(each) for each in (*node.bases, *node.decorator_list)]
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    found[f"{node.name}.{member.name}"] = signature(member)
                elif isinstance(member, ast.AnnAssign):
                    found[f"{node.name}.{member.target.id}"] = field(member)
    return {name: what for name, what in found.items() if not name.startswith("_")}


def signature(function):
    returns = ast.unparse(function.returns) if function.returns else None
    return [ast.unparse(each) for each in function.decorator_list], ast.unparse(function.args), returns


def field(member):
    """Its default; one made by a factory counts as such, whatever makes it."""
    default = ast.unparse(member.value) if member.value else "none"
    if default.startswith("field(default_factory=") and not default.endswith(("=set)", "=list)")):
        default = "field(default_factory=...)"
    return ast.unparse(member.annotation), default


def differences(path, ours, theirs):
    ours, theirs = members(ours), members(theirs)
    if path == "atom/config.py":  # what is registered of a layer, and hundreds of settings
        theirs = {name: what for name, what in theirs.items() if name.split(".")[0] == "KVCacheTensor"}
    left_out = LEFT_OUT.get(path, set())
    missing = {name for name in theirs.keys() - ours.keys() if not {name, name.split(".")[0]} & left_out}
    return missing | (ours.keys() - theirs.keys()) | {n for n in ours.keys() & theirs.keys() if ours[n] != theirs[n]}


FILES = [f"{PLACE}/base.py", f"{PLACE}/types.py", f"{PLACE}/factory.py", "atom/config.py"]


@pytest.mark.parametrize("path", FILES)
def test_the_double_has_what_the_real_file_has(path):
    assert differences(path, (DOUBLE / path).read_text(), real(path)) == set()


@pytest.mark.parametrize(
    ("path", "old", "new", "name"),
    [
        (
            f"{PLACE}/base.py",
            "num_blocks: int | None = None",
            "num_blocks: int = 0",
            "KVConnectorBase.register_kv_caches",
        ),
        (f"{PLACE}/base.py", "class KVConnectorBase(ABC)", "class KVConnectorBase", "KVConnectorBase"),
        (f"{PLACE}/types.py", "num_slots: int = 0", "num_slots: int", "KVTransferTensors.num_slots"),
        (f"{PLACE}/types.py", "    failed_loading: set[", "    failed: set[", "KVConnectorOutput.failed_loading"),
        (
            f"{PLACE}/factory.py",
            "requires_pd_staging: bool = True",
            "staging: bool = True",
            "KVConnectorFactory.register",
        ),
        ("atom/config.py", "index_cache: torch.Tensor", "index: torch.Tensor", "KVCacheTensor.index_cache"),
    ],
)
def test_a_difference_is_seen(path, old, new, name):
    ours = (DOUBLE / path).read_text()
    assert old in ours
    assert name in differences(path, ours.replace(old, new), real(path))


# Behaviour


@pytest.fixture(params=["double", "real"])
def types(request, monkeypatch):
    if request.param == "double":
        return double_types
    module = ModuleType("atom_types_as_they_are")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look there for their annotations
    exec(real(f"{PLACE}/types.py"), vars(module))
    return module


def test_operation_ids_are_compared_by_kind_request_and_generation(types):
    ids = [
        kind(request, n)
        for kind in (types.SaveOperationId, types.LoadOperationId)
        for request in (1, 2)
        for n in (0, 1)
    ]
    assert len(set(ids)) == 8
    for kind in (types.SaveOperationId, types.LoadOperationId):
        with pytest.raises(ValueError, match="generation"):
            kind(1, -1)


def test_a_completion_has_a_channel_an_operation_and_an_outcome(types):
    assert types.ConnectorCompletion("ours", 7, True).key == ("ours", 7)
    for arguments in (("", 7, True), ("ours", 7, 1), ("ours", [7], True)):
        with pytest.raises((TypeError, ValueError)):
            types.ConnectorCompletion(*arguments)


def test_units_are_numbered_from_either_end(types):
    region = types.KVTransferRegion(1000, 40, 10)
    assert [region.unit_addr(at) for at in range(4)] == [1000, 1010, 1020, 1030]
    region.reverse_indexed = True
    assert [region.unit_addr(at) for at in range(4)] == [1030, 1020, 1010, 1000]


def test_an_output_is_empty_until_something_ended(types):
    assert types.KVConnectorOutput(expected_finished_count=3).is_empty()
    for name in ("finished_sending", "finished_recving", "failed_recving", "finished_saving", "finished_loading"):
        assert not types.KVConnectorOutput(**{name: {1}}).is_empty()
    assert not types.KVConnectorOutput(connector_completions={types.ConnectorCompletion("ours", 7, True)}).is_empty()


def test_metadata_has_work_if_it_has_requests(types):
    metadata = types.ConnectorMetadata()
    assert not types.connector_metadata_has_work(None) and not types.connector_metadata_has_work(metadata)
    metadata.requests = [1]  # a field of connectors' own metadata
    assert types.connector_metadata_has_work(metadata)
    for name in ("reqs_to_recv", "reqs_to_save", "reqs_to_send", "reqs_in_batch", "reqs_not_processed"):
        metadata = types.ConnectorMetadata()
        setattr(metadata, name, {1: 2})
        assert types.connector_metadata_has_work(metadata)


def test_connectors_are_found_by_name_in_any_case_and_made_by_role():
    """On the ATOM that is imported here, the real one or the double. The "connectors" are functions of Python."""
    from atom.kv_transfer.disaggregation.factory import KVConnectorFactory as Factory

    modules = dict(worker_module="builtins", worker_class="type", scheduler_module="builtins", scheduler_class="str")
    for name, staging in (("of these tests", True), ("of these tests, too", False)):
        Factory.register(name, **modules, aliases=[f"another {name}"], requires_pd_staging=staging)
        assert Factory.canonical_name(f" Another {name.upper()}") == name
        config = SimpleNamespace(kv_transfer_config={"kv_connector": name})
        assert Factory.topology_uses_pd_staging(config.kv_transfer_config) == staging
        assert Factory.create_connector(config, role="worker") is SimpleNamespace
        assert Factory.create_connector(config, role="scheduler") == str(config)
        with pytest.raises(ValueError, match="role"):
            Factory.create_connector(config, role="neither")
    assert not Factory.topology_uses_pd_staging({})
    with pytest.raises(ValueError, match="unheard of"):
        Factory.canonical_name("unheard of")
