"""What we use of vLLM, release by release: the classes, their methods with their parameters, and their fields.

    python -m tests_vllm.contract vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl > tests_vllm/contracts/0.33.0.json

reads it out of a wheel, or out of a folder in which vLLM is installed, without importing anything. The files are facts
to hold our connector against (`test_contract.py`), also where a release cannot run: on this machine, without a GPU.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

USED = {
    "vllm/distributed/kv_transfer/kv_connector/v1/base.py": ["KVConnectorBase_V1", "SupportsHMA"],
    "vllm/distributed/kv_transfer/kv_connector/v1/metrics.py": ["KVConnectorStats", "KVConnectorPromMetrics"],
    "vllm/v1/core/block_pool.py": ["BlockPool"],
    "vllm/v1/core/kv_cache_utils.py": ["KVCacheBlock", "FreeKVCacheBlockQueue"],
    "vllm/v1/core/kv_cache_coordinator.py": ["HybridKVCacheCoordinator"],
    "vllm/v1/core/sched/output.py": ["SchedulerOutput"],
    "vllm/v1/outputs.py": ["KVConnectorOutput"],
    "vllm/v1/request.py": ["Request"],
    "vllm/v1/kv_cache_interface.py": ["KVCacheConfig", "KVCacheGroupSpec", "SlidingWindowSpec", "MambaSpec"],
}


def sources(where: Path) -> dict[str, str]:
    """The text of each file we use, from a wheel or from a folder with packages."""
    if where.is_dir():
        return {name: (where / name).read_text() for name in USED}
    with zipfile.ZipFile(where) as wheel:
        return {name: wheel.read(name).decode() for name in USED}


def contract(texts: dict[str, str]) -> dict:
    """Class by class: `methods` with the names of their parameters, whether they are `abstract`, and `fields`."""
    found = {}
    for name, text in texts.items():
        classes = {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}
        found |= {each: described(classes[each]) for each in USED[name]}
    return found


def described(node: ast.ClassDef) -> dict:
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    assigned = [target for each in ast.walk(node) if isinstance(each, ast.Assign) for target in each.targets]
    assigned += [each.target for each in ast.walk(node) if isinstance(each, ast.AnnAssign)]
    fields = {each.id for each in assigned if isinstance(each, ast.Name)}
    fields |= {each.attr for each in assigned if isinstance(each, ast.Attribute)}
    return {
        "methods": {name: parameters(method) for name, method in sorted(methods.items())},
        "abstract": sorted(name for name, method in methods.items() if has_decorator(method, "abstractmethod")),
        "fields": sorted(fields),
    }


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
