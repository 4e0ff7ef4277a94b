"""Facts of vLLM that we rely on: the names that its modules have to import, and of classes the fields, and the methods
with their parameters. They are read out of a wheel, or out of a folder in which vLLM is installed, without importing
anything. `releases.py` keeps them, release by release; `test_contract.py` holds our connector against them, also where
a release cannot run: on this machine, without a GPU.
"""

import ast
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

# Pairs: a module and a public name of it; a class and a field of it, or a method, as "name(self, parameter)" or, if it
# has to be overridden, "abstract name(self, parameter)". Of what is read alone: public names.
Contract = frozenset[tuple[str, str]]
ABSTRACT = "abstract "
READ = (
    "vllm/config/",
    "vllm/distributed/kv_events.py",
    "vllm/distributed/parallel_state.py",
    "vllm/v1/core/sched/output.py",
    "vllm/v1/kv_cache_interface.py",
    "vllm/v1/kv_offload/config.py",
    "vllm/v1/outputs.py",
    "vllm/v1/request.py",
)

USED = {
    "vllm/envs.py": [],
    "vllm/logger.py": [],
    "vllm/config/__init__.py": [],
    "vllm/config/cache.py": ["CacheConfig"],
    "vllm/config/load.py": ["LoadConfig"],
    "vllm/config/model.py": ["ModelConfig"],
    "vllm/config/multimodal.py": ["MultiModalConfig"],
    "vllm/config/parallel.py": ["ParallelConfig"],
    "vllm/config/scheduler.py": ["SchedulerConfig"],
    "vllm/config/speculative.py": ["SpeculativeConfig"],
    "vllm/config/vllm.py": ["VllmConfig"],
    "vllm/distributed/kv_events.py": ["BlockStored", "BlockRemoved"],
    "vllm/distributed/kv_transfer/kv_connector/factory.py": ["KVConnectorFactory"],
    "vllm/distributed/kv_transfer/kv_connector/utils.py": [],
    "vllm/distributed/kv_transfer/kv_connector/v1/base.py": ["KVConnectorBase_V1", "SupportsHMA"],
    "vllm/distributed/kv_transfer/kv_connector/v1/metrics.py": ["KVConnectorStats", "KVConnectorPromMetrics"],
    "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py": ["MultiConnector"],
    "vllm/distributed/kv_transfer/kv_connector/v1/offloading_connector.py": ["OffloadingConnector"],
    "vllm/distributed/parallel_state.py": ["GroupCoordinator"],
    "vllm/platforms/__init__.py": [],
    "vllm/v1/core/block_pool.py": ["BlockPool", "BlockHashToBlockMap"],
    "vllm/v1/core/kv_cache_utils.py": ["KVCacheBlock", "FreeKVCacheBlockQueue"],
    "vllm/v1/core/kv_cache_manager.py": ["KVCacheBlocks"],
    "vllm/v1/core/sched/output.py": ["SchedulerOutput"],
    "vllm/v1/outputs.py": ["KVConnectorOutput"],
    "vllm/v1/request.py": ["Request", "RequestStatus"],
    "vllm/v1/kv_offload/base.py": ["OffloadingSpec", "ReqContext"],
    "vllm/v1/kv_offload/config.py": ["OffloadingConfig", "OffloadingGroupConfig", "OffloadingParallelConfig"],
    "vllm/v1/kv_offload/cpu/policies/base.py": ["CachePolicy"],
    "vllm/v1/kv_offload/tiering/base.py": ["JobResult", "SecondaryTierManager", "TransferJob"],
    "vllm/v1/kv_offload/tiering/factory.py": ["SecondaryTierFactory"],
    "vllm/v1/kv_cache_interface.py": [
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "KVCacheTensor",
        "UniformTypeKVCacheSpecs",
        "AttentionSpec",
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec",
        "MambaSpec",
    ],
}


def sources(where: Path) -> dict[str, str]:
    """The text of each file we use, from a wheel or from a folder with packages."""
    if where.is_dir():
        return {name: (where / name).read_text() for name in USED}
    with zipfile.ZipFile(where) as wheel:
        return {name: wheel.read(name).decode() for name in USED}


def contract(texts: dict[str, str]) -> Contract:
    """The facts in the texts of the files we use."""
    found: set[tuple[str, str]] = set()
    for name, source in texts.items():
        tree = ast.parse(source)
        classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        of_class = public if name.startswith(READ) else described
        found |= {(owner, member) for owner in USED[name] for member in of_class(classes[owner])}
        found |= {(module_of(name), each) for each in defined(tree, reexports=name.endswith("__init__.py"))}
    return Contract(found)


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def defined(tree: ast.Module, reexports: bool) -> set[str]:
    """The public names of a module, without what it imports for itself."""
    names = [each.id for each in assigned(tree.body) if isinstance(each, ast.Name)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom) and reexports:
            names += [each.asname or each.name for each in node.names]
    return {name for name in names if not name.startswith("_")}


def described(node: ast.ClassDef) -> set[str]:
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    fields = {each.id for each in assigned(node.body) if isinstance(each, ast.Name)}
    inside = assigned(each for method in methods.values() for each in ast.walk(method))
    fields |= {each.attr for each in inside if isinstance(each, ast.Attribute)}
    return fields | {signature(method) for method in methods.values()}


def public(node: ast.ClassDef) -> set[str]:
    return {name for member in described(node) if not (name := name_of(member)).startswith("_")}


def signature(method: ast.FunctionDef) -> str:
    before = ABSTRACT if has_decorator(method, "abstractmethod") else ""
    return f"{before}{method.name}({', '.join(parameters(method))})"


def assigned(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield from node.targets
        elif isinstance(node, ast.AnnAssign):
            yield node.target


def parameters(method: ast.FunctionDef) -> list[str]:
    given = method.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    starred = [f"*{given.vararg.arg}"] if given.vararg else []
    return names + starred + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def has_decorator(method: ast.FunctionDef, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in method.decorator_list)


# Members


def members(contract: Contract, owner: str) -> set[str]:
    return {member for each, member in contract if each == owner}


def name_of(member: str) -> str:
    return member.removeprefix(ABSTRACT).partition("(")[0]


def names(contract: Contract, owner: str) -> set[str]:
    """The fields and methods of a class, or the public names of a module."""
    return {name_of(member) for member in members(contract, owner)}


def methods(contract: Contract, owner: str) -> dict[str, list[str]]:
    """The parameters of each method."""
    found = [each for each in members(contract, owner) if "(" in each]
    return {name_of(each): listed(each.partition("(")[2].removesuffix(")")) for each in found}


def listed(parameters: str) -> list[str]:
    return parameters.split(", ") if parameters else []


def abstract(contract: Contract, owner: str) -> set[str]:
    return {name_of(each) for each in members(contract, owner) if each.startswith(ABSTRACT)}


def imported_from_vllm(package: ModuleType) -> list[ast.ImportFrom]:
    """Each import of names of vLLM in the files of a package of ours."""
    texts = [path.read_text() for path in Path(str(package.__file__)).parent.glob("*.py")]
    found = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    return [node for node in found if str(node.module).startswith("vllm.")]
