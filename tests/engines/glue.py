"""How much an engine's author writes."""

import ast
import io
import tokenize
from pathlib import Path

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    """The lines of a file, as `ruff format` writes it, that are not blank, comments or docstrings."""
    source = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for each in tokens if each.type not in NO_CODE for line in range(each.start[0], each.end[0] + 1)}
    return len(lines - _docstrings(ast.parse(source)))


def _docstrings(tree: ast.Module) -> set[int]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (each.body[0] for each in ast.walk(tree) if isinstance(each, documented) and ast.get_docstring(each, False))
    return {line for each in found for line in range(each.lineno, each.end_lineno + 1)}
