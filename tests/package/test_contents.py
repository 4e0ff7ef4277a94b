"""The wheel holds the library, and of its tests only `cpu_prefix_cache.testing`. The sdist holds all tests."""

import ast
import email
import shutil
import subprocess
import tarfile
import tomllib
import zipfile

from tests.package.conftest import ROOT, build

PACKAGES = {"connector", "cpu_prefix_cache", "cpu_prefix_cache_vllm"}
FOR_TESTS = {"hypothesis", "pytest", "unittest", "tests", "property_tests"}
FOR_TESTS_OF_OTHERS = {"cpu_prefix_cache/testing/device.py"}
CACHES = {"__pycache__", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv", ".venv-vllm"}
ONLY_FOR_GIT = {".gitignore"}


def test_the_wheel_holds_the_packages_and_no_tests(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
        assert {name for name in names if not name.endswith(".dist-info")} == PACKAGES
        assert modules_for_tests(archive) == FOR_TESTS_OF_OTHERS
        assert {"cpu_prefix_cache/py.typed", "connector/py.typed"} <= set(archive.namelist())


def test_control_a_test_that_was_left_in_a_package_is_noticed(unpacked, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(unpacked, source)
    (source / "src/cpu_prefix_cache/pool/test_pool.py").write_text("def test_nothing(): ...\n")
    (source / "src/connector/laws.py").write_text("from hypothesis import given\n")
    build(source, tmp_path, "--wheel")
    (planted,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(planted) as archive:
        found = modules_for_tests(archive) - FOR_TESTS_OF_OTHERS
    assert found == {"cpu_prefix_cache/pool/test_pool.py", "connector/laws.py"}


def test_the_sdist_holds_all_that_the_repository_does_and_no_caches(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in names if set(name.split("/")) & CACHES]
    assert repository() - names == ONLY_FOR_GIT


def test_the_metadata_names_license_version_and_extras(wheel):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        said = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
    assert said["License-Expression"] == "Apache-2.0"
    assert f"cpu_prefix_cache-{said['Version']}-py3-none-any.whl" == wheel.name
    assert set(said.get_all("Provides-Extra")) == set(project["optional-dependencies"])


def repository() -> set[str]:
    """The files that are in it, or would be with the next commit."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in names if (ROOT / name).exists()}


def modules_for_tests(archive: zipfile.ZipFile) -> set[str]:
    """The modules that look like tests, by their name or by what they import."""
    return {
        name
        for name in archive.namelist()
        if name.endswith(".py") and (_named_like_a_test(name) or imported(archive.read(name)) & FOR_TESTS)
    }


def _named_like_a_test(name: str) -> bool:
    *folders, file = name.split("/")
    return file == "conftest.py" or file.startswith("test_") or file.endswith("_test.py") or "tests" in folders


def imported(source: bytes) -> set[str]:
    """The packages that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.partition(".")[0])
    return found
