"""What we use of vLLM, release by release: what its modules have to import, and of classes the methods with their
parameters, and the fields.

    python -m tests_vllm.contract vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl > tests_vllm/contracts/0.33.0.json

reads it out of a wheel, or out of a folder in which vLLM is installed, without importing anything. The files are facts
to hold our connector against (`test_contract.py`), also where a release cannot run: on this machine, without a GPU.
"""

import ast
import json
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

USED = {
    "vllm/logger.py": [],
    "vllm/config/__init__.py": [],
    "vllm/config/cache.py": ["CacheConfig"],
    "vllm/config/parallel.py": ["ParallelConfig"],
    "vllm/config/scheduler.py": ["SchedulerConfig"],
    "vllm/config/speculative.py": ["SpeculativeConfig"],
    "vllm/config/vllm.py": ["VllmConfig"],
    "vllm/distributed/kv_events.py": ["BlockStored", "BlockRemoved"],
    "vllm/distributed/kv_transfer/kv_connector/factory.py": ["KVConnectorFactory"],
    "vllm/distributed/kv_transfer/kv_connector/v1/base.py": ["KVConnectorBase_V1", "SupportsHMA"],
    "vllm/distributed/kv_transfer/kv_connector/v1/metrics.py": ["KVConnectorStats", "KVConnectorPromMetrics"],
    "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py": ["MultiConnector"],
    "vllm/distributed/parallel_state.py": ["GroupCoordinator"],
    "vllm/v1/core/block_pool.py": ["BlockPool", "BlockHashToBlockMap"],
    "vllm/v1/core/kv_cache_utils.py": ["KVCacheBlock", "FreeKVCacheBlockQueue"],
    "vllm/v1/core/kv_cache_manager.py": ["KVCacheBlocks"],
    "vllm/v1/core/sched/output.py": ["SchedulerOutput"],
    "vllm/v1/outputs.py": ["KVConnectorOutput"],
    "vllm/v1/request.py": ["Request", "RequestStatus"],
    "vllm/v1/kv_cache_interface.py": [
        *("KVCacheConfig", "KVCacheGroupSpec", "KVCacheTensor", "UniformTypeKVCacheSpecs"),
        *("AttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec", "MambaSpec"),
    ],
}


def sources(where: Path) -> dict[str, str]:
    """The text of each file we use, from a wheel or from a folder with packages."""
    if where.is_dir():
        return {name: (where / name).read_text() for name in USED}
    with zipfile.ZipFile(where) as wheel:
        return {name: wheel.read(name).decode() for name in USED}


def contract(texts: dict[str, str]) -> dict:
    """Class by class: `methods` with the names of their parameters, whether they are `abstract`, and `fields`. And
    under `names`, module by module, what can be imported from it."""
    found: dict[str, dict] = {"names": {}}
    for name, text in texts.items():
        tree = ast.parse(text)
        classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        found |= {each: described(classes[each]) for each in USED[name]}
        found["names"][module_of(name)] = sorted(defined(tree, reexports=name.endswith("__init__.py")))
    return found


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


def described(node: ast.ClassDef) -> dict:
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    fields = {each.id for each in assigned(node.body) if isinstance(each, ast.Name)}
    inside = assigned(each for method in methods.values() for each in ast.walk(method))
    fields |= {each.attr for each in inside if isinstance(each, ast.Attribute)}
    return {
        "methods": {name: parameters(method) for name, method in sorted(methods.items())},
        "abstract": sorted(name for name, method in methods.items() if has_decorator(method, "abstractmethod")),
        "fields": sorted(fields),
    }


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


if __name__ == "__main__":
    json.dump(contract(sources(Path(sys.argv[1]))), sys.stdout, indent=1)
    print()
