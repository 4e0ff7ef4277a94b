"""The sdist, unpacked in an empty folder: all that `make test` and `make test-engines` run is found.

Some of it passes, in this venv.
"""

import sys

from tests.package.conftest import run

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
# Quick ones that read files of the repository beside the code.
SOME = ["tests/unit/test_layering.py", "tests/unit/test_hybrid_models.py", "tests/unit/plugin"]


def test_every_test_can_be_collected(unpacked):
    run([*PYTEST, "--collect-only", "-q"], unpacked)
    run([*PYTEST, "--collect-only", "-q", "tests/engines"], unpacked)


def test_some_of_them_pass_on_its_own_code(unpacked):
    assert "passed" in run([*PYTEST, *SOME], unpacked)


def test_control_they_read_the_code_beside_them(unpacked):
    """They do not read the code of the repository, which this venv has installed."""
    file = unpacked / "src" / "cpu_prefix_cache" / "model" / "planner.py"
    text = file.read_text()
    file.write_text(text + "\nraise RuntimeError('planted')\n")
    try:
        assert "planted" in run([*PYTEST, "tests/unit/test_hybrid_models.py"], unpacked, expected=2)
    finally:
        file.write_text(text)
