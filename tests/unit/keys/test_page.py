"""The program of docs/keys.md runs, and prints what the page shows."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "keys.md").read_text()


def test_the_program_of_the_page_runs():
    pytest.importorskip("torch")
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    [shown] = re.findall(r"It prints\n\n```\n(.*?)```", PAGE, re.DOTALL)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(program, "docs/keys.md", "exec"), {})
    assert printed.getvalue() == shown
