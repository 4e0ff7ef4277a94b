"""Possible faults of each statement of a file: one change each, kept as a replacement of a span of bytes.

A fault is known by its content, not by its place: the qualified name of the function, the statement (its header, if it
has a body) in `ast`'s own spelling, what is changed, and which of the equal ones in the file it is.
"""

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

Content = tuple[str, str, str, str, str, int]  # file, function, statement, kind, change, nth
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Code that only judges the code, and statements that only print.
CHECKS = ("check_valid", "_check_resumable", "__repr__")
WORDS = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Pass)
EXITS = (ast.Return, ast.Continue, ast.Break, ast.Raise)

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "list"}


@dataclass(frozen=True)
class Fault:
    function: str  # qualified name in its module; "" at the top
    statement: str  # as `ast` spells it, of a compound statement the header
    kind: str
    change: str  # in words
    nth: int  # of the faults of this file that are equal so far
    file: str  # relative to the root of the tree
    lines: range  # of the statement, or of its header
    whole: range  # lines of the function
    start: int  # bytes
    stop: int
    new: str

    @property
    def content(self) -> Content:
        return (self.file, self.function, self.statement, self.kind, self.change, self.nth)

    def put_into(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]

    def __str__(self) -> str:
        where = f" in {self.function}" if self.function else ""
        return f"{self.file}:{self.lines.start}{where}: {self.kind}: {self.change}"


def faults_of(file: str, source: str) -> list[Fault]:
    """All faults of a file, in its order."""
    equal: Counter[tuple[str, ...]] = Counter()
    found = []
    for fault in _Finder(file, source).of_body(ast.parse(source).body, "", None):
        key = (fault.function, fault.statement, fault.kind, fault.change)
        found.append(replace(fault, nth=equal[key]))
        equal[key] += 1
    return found


class _Finder:
    def __init__(self, file: str, source: str) -> None:
        self._file = file
        self._source = source.encode()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def of_body(self, body: list[ast.stmt], name: str, function: Function | None) -> Iterator[Fault]:
        for statement in body:
            if isinstance(statement, WORDS):
                continue
            if isinstance(statement, ast.ClassDef | Function) and statement.name not in CHECKS:
                inner = f"{name}.{statement.name}" if name else statement.name
                outermost = statement if function is None and isinstance(statement, Function) else function
                yield from self._of_one(statement, inner, outermost)
                yield from self.of_body(statement.body, inner, outermost)
            elif not isinstance(statement, ast.ClassDef | Function):
                yield from self._of_one(statement, name, function, last=statement is body[-1] and len(body) == 1)
                for inner_body in _bodies(statement):
                    yield from self.of_body(inner_body, name, function)

    def _of_one(self, statement: ast.stmt, name: str, function: Function | None, last: bool = False) -> Iterator[Fault]:
        header = _header(statement)
        end = statement.end_lineno or statement.lineno
        bodies = _bodies(statement)
        if bodies and bodies[0]:
            end = max(statement.lineno, min(bodies[0][0].lineno - 1, end))
        of = function or statement
        whole = range(of.lineno, (of.end_lineno or of.lineno) + 1)

        def fault(node: ast.AST, kind: str, new: str, change: str) -> Fault:
            start, stop = self._span(node)
            lines = range(statement.lineno, end + 1)
            return Fault(name, header, kind, change, 0, self._file, lines, whole, start, stop, new)

        if function is not None:
            for kind, new in _of_statement(statement, alone=last):
                if not self._source.startswith(b"elif", self._span(statement)[0]):
                    yield fault(statement, kind, new, f"`{header}`" + (f" becomes `{new}`" if new != "pass" else ""))
        for expression in _expressions(statement):
            for node in _nodes(expression):
                old = ast.unparse(node)
                for kind, new in _of_expression(node, inside=function is not None):
                    if new != old:
                        bare = isinstance(node, ast.Constant | ast.Call)
                        yield fault(node, kind, new if bare else f"({new})", f"`{old}` becomes `{new}` in `{header}`")

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, stop = self._starts[node.lineno - 1], self._starts[node.end_lineno - 1]
        return start + node.col_offset, stop + node.end_col_offset


def _bodies(statement: ast.stmt) -> list[list[ast.stmt]]:
    bodies = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
    bodies += [inner.body for field in ("handlers", "cases") for inner in getattr(statement, field, [])]
    return bodies


def _header(statement: ast.stmt) -> str:
    """A statement in one spelling, without what hangs below it and without its decorators."""
    short = copy.copy(statement)
    for field in ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list"):
        if hasattr(short, field):
            setattr(short, field, [ast.Pass()] if field == "body" else [])
    text = ast.unparse(short)
    return text.removesuffix("pass").strip() if hasattr(short, "body") else text


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Expressions that a statement computes itself: no annotation, no decorator, no statement of its body."""
    if isinstance(statement, Function):
        yield from statement.args.defaults
        yield from (default for default in statement.args.kw_defaults if default is not None)
    elif isinstance(statement, ast.AnnAssign):
        if statement.value is not None:
            yield statement.value
    elif isinstance(statement, ast.With):
        yield from (item.context_expr for item in statement.items)
    elif not isinstance(statement, ast.ClassDef):
        yield from (child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr))


def _nodes(expression: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(expression, ast.JoinedStr):
        yield expression
        for child in ast.iter_child_nodes(expression):
            yield from _nodes(child)


def _of_statement(statement: ast.stmt, *, alone: bool) -> Iterator[tuple[str, str]]:
    """Faults of a statement as a whole: it is left out, or it counts the other way round."""
    if isinstance(statement, ast.If) and not statement.orelse:
        yield ("exit removed" if isinstance(statement.body[-1], EXITS) else "dropped"), "pass"
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield "dropped", "pass"
    if isinstance(statement, ast.AugAssign | ast.Delete | ast.Continue | ast.Break):
        yield "dropped", "pass"
    if isinstance(statement, ast.Assign) and not any(isinstance(target, ast.Name) for target in statement.targets):
        yield "dropped", "pass"
    if isinstance(statement, ast.Return) and statement.value is None and not alone:
        yield "exit removed", "pass"
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add | ast.Sub):
        yield "arithmetic", ast.unparse(_with(statement, op=OPERATORS[type(statement.op)]()))


def _of_expression(node: ast.AST, *, inside: bool) -> Iterator[tuple[str, str]]:
    """Faults of one node of an expression; outside functions numbers alone, as the rest ends at import."""
    if isinstance(node, ast.Constant):
        yield from _of_constant(node)
    if inside:
        for kind, of in KINDS.items():
            for new in of(node):
                yield kind, ast.unparse(new)


def _of_constant(node: ast.Constant) -> Iterator[tuple[str, str]]:
    if isinstance(node.value, bool):
        yield "constant", str(not node.value)
    elif isinstance(node.value, int):
        yield "off by one", str(node.value + 1)
        if node.value > 0:
            yield "off by one", str(node.value - 1)


def _comparisons(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)]:
                yield _with(node, ops=[*node.ops[:at], other(), *node.ops[at + 1 :]])


def _operators(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield _with(node, op=OPERATORS[type(node.op)]())


def _conditions(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for at in range(len(node.values)):
            rest = [*node.values[:at], *node.values[at + 1 :]]
            yield _with(node, values=rest) if len(rest) > 1 else rest[0]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    if isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)


def _arguments(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Call) or any(isinstance(argument, ast.Starred) for argument in node.args):
        return
    called = node.func.id if isinstance(node.func, ast.Name) else ""
    if len(node.args) >= 2 and called not in ("min", "max", "zip", "isinstance"):
        yield _with(node, args=[node.args[1], node.args[0], *node.args[2:]])


def _calls(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        other = FUNCTIONS[node.func.id]
        yield _with(node, func=ast.Name(other), keywords=[] if other == "list" else node.keywords)


def _bounds(node: ast.AST) -> Iterator[ast.AST]:
    """A slice that begins or ends one later, as `a[1 + i:n]`; constants are off by one anyway."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        for side in ("lower", "upper"):
            bound = getattr(node.slice, side)
            if bound is not None and not isinstance(bound, ast.Constant):
                later = ast.BinOp(bound, ast.Add(), ast.Constant(1))
                yield _with(node, slice=_with(node.slice, **{side: later}))


KINDS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "comparison": _comparisons,
    "arithmetic": _operators,
    "condition": _conditions,
    "arguments swapped": _arguments,
    "another function": _calls,
    "off by one": _bounds,
}


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
