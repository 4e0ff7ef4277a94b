"""Subjects of mutation: a part of the code, and the tests that should notice a fault in it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Subject:
    """Folders and files relative to the root of the tree; what is left out is named by a folder or file below them."""

    code: tuple[str, ...]
    tests: tuple[str, ...]
    code_left_out: frozenset[str] = frozenset()
    tests_left_out: frozenset[str] = frozenset()

    def sources(self, root: Path) -> list[Path]:
        """Python files whose faults are tried."""
        return sorted(_python_files(root, self.code, self.code_left_out))

    def test_files(self, root: Path) -> list[Path]:
        """Files with tests; the sources are among them for their doctests."""
        tests = [file for file in _python_files(root, self.tests, self.tests_left_out) if file.name.startswith("test_")]
        return [*tests, *self.sources(root)]


def _python_files(root: Path, folders: tuple[str, ...], left_out: frozenset[str]) -> Iterator[Path]:
    for folder in folders:
        for file in (root / folder).rglob("*.py"):
            if left_out.isdisjoint(file.relative_to(root / folder).parts):
                yield file


FAR = "test_far_blocks_laws.py"  # needs more addresses than a trial may have, and fails with and without a fault

SUBJECTS = {
    "deciding": Subject(
        code=("src/cpu_prefix_cache",),
        tests=("tests/unit", "property_tests"),
        code_left_out=frozenset({"copier", "memory", "tools"}),
        tests_left_out=frozenset(
            {"bench", "copier", "examples", "memory", "mutants", "packaging", "replay", "test_links.py", FAR}
        ),
    ),
    "copies": Subject(
        code=("src/cpu_prefix_cache/copier", "src/cpu_prefix_cache/memory"),
        tests=("tests/unit/copier", "tests/unit/memory", "property_tests/laws"),
        tests_left_out=frozenset({FAR}),
    ),
    "connectors": Subject(
        code=("src/connector",),
        tests=("tests/connector", "tests/engines/atom"),
        code_left_out=frozenset({"vllm", "vllm_offloading", "vllm_tiers"}),
    ),
    # In the environment of `make test-vllm`. Two servers on one store start too slowly for every fault.
    "vllm": Subject(
        code=(
            "src/connector/vllm",
            "src/connector/vllm_offloading",
            "src/connector/vllm_tiers",
            "src/connector/tier",
            "src/connector/common",
        ),
        tests=("tests/vllm",),
        tests_left_out=frozenset({"test_shared_servers.py"}),
    ),
}
