"""Which faults are tried: drawn by seed, or those of a list that was written before the code moved.

A draw sorts all faults by a digest of seed and content and takes the first, at most one of each statement. So the draw
of another day has the same faults wherever the code is the same, and a longer draw begins with a shorter one.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

from property_tests.mutants.faults import Content, Fault, faults_of
from property_tests.mutants.subjects import Subject


def population(root: Path, subject: Subject) -> list[Fault]:
    """Every fault of the subject in the tree at `root`."""
    files = subject.sources(root)
    return [fault for file in files for fault in faults_of(str(file.relative_to(root)), file.read_text())]


def draw(faults: Iterable[Fault], seed: int, count: int) -> list[Fault]:
    def rank(fault: Fault) -> tuple[bytes, str]:
        return hashlib.sha256(f"{seed} {fault.content[1:]}".encode()).digest(), fault.file

    drawn: dict[tuple[str, int], Fault] = {}  # by statement
    for fault in sorted(faults, key=rank):
        if len(drawn) == count:
            break
        drawn.setdefault((fault.file, fault.lines.start), fault)
    return list(drawn.values())


def write(path: Path, faults: Iterable[Fault]) -> None:
    rows = [{"line": fault.lines.start, "content": fault.content} for fault in faults]
    path.write_text(json.dumps(rows, indent=1) + "\n")


def read(path: Path, faults: Sequence[Fault]) -> tuple[list[Fault], list[str]]:
    """The faults of a list as they are today, and those whose statement no longer exists, in words."""
    found, gone = [], []
    for row in json.loads(path.read_text()):
        file, function, statement, kind, change, nth = row["content"]
        fault = _find(faults, (file, function, statement, kind, change, nth))
        if fault is not None:
            found.append(fault)
        else:
            gone.append(f"{file}:{row['line']} in {function}: {kind}: {change}")
    return found, gone


def _find(faults: Sequence[Fault], content: Content) -> Fault | None:
    """The fault of this content: in its file, a file of that name, any file; or the only one, in another function."""
    same = [fault for fault in faults if fault.content[1:] == content[1:]]
    for candidates in (
        [fault for fault in same if fault.content == content],
        [fault for fault in same if PurePath(fault.file).name == PurePath(content[0]).name],
        same,
        [fault for fault in faults if fault.content[2:5] == content[2:5]],
    ):
        if len(candidates) == 1:
            return candidates[0]
    return None


def by_file(faults: Iterable[Fault]) -> dict[str, list[Fault]]:
    files: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        files[fault.file].append(fault)
    return files
