"""Contracts of the releases of vLLM that the connector runs with, on file: in what each differs from the one before it,
the first from nothing.

    0.30.0.json    {"BlockPool": ["blocks", "touch(self, blocks)"]}
    0.31.0.json    {"BlockPool": ["-touch(self, blocks)", "touch(self, blocks, by)"]}    with a minus: no longer there

    python -m tests.vllm.releases record 0.34.0 vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl
    python -m tests.vllm.releases drop 0.30.0

change one release and write all files again.
"""

import json
import re
import sys
import textwrap
from argparse import ArgumentParser
from itertools import groupby
from pathlib import Path

from tests.vllm.contract import Contract, contract, name_of, sources

FOLDER = Path(__file__).parent / "contracts"
COLUMNS = 120
GONE = "-"

Changes = dict[str, list[str]]  # by module or class


def recorded(folder: Path = FOLDER) -> dict[str, Contract]:
    """The contracts of all releases on file, by number, oldest first."""
    found, latest = {}, Contract()
    for path in sorted(folder.glob("*.json"), key=lambda path: age(path.stem)):
        found[path.stem] = latest = changed(latest, json.loads(path.read_text()))
    return found


def write(releases: dict[str, Contract], folder: Path = FOLDER) -> None:
    """Write a file for each release, and remove those of others."""
    latest = Contract()
    for path in folder.glob("*.json"):
        path.unlink()
    for number in sorted(releases, key=age):
        (folder / f"{number}.json").write_text(text(changes(latest, releases[number])))
        latest = releases[number]


def age(number: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", number)]


def changes(before: Contract, after: Contract) -> Changes:
    found = [*(after - before), *((owner, GONE + member) for owner, member in before - after)]
    groups = groupby(sorted(found, key=place), key=lambda pair: pair[0])
    return {owner: [member for _, member in pairs] for owner, pairs in groups}


def place(pair: tuple[str, str]) -> tuple[str, bool, str, bool]:
    """Methods come after fields, and the old form of a method before its new one."""
    owner, member = pair
    return owner, "(" in member, name_of(member.removeprefix(GONE)), not member.startswith(GONE)


def changed(before: Contract, by: Changes) -> Contract:
    """Raises ValueError if these are changes to another contract."""
    pairs = {(owner, member) for owner, members in by.items() for member in members}
    gone = {(owner, member.removeprefix(GONE)) for owner, member in pairs if member.startswith(GONE)}
    new = {pair for pair in pairs if not pair[1].startswith(GONE)}
    if unfit := (gone - before) | (new & before):
        raise ValueError(f"{len(unfit)} changes to another release than the one before: {sorted(unfit)[:3]} ...")
    return (before - gone) | new


def text(by: Changes) -> str:
    """JSON with a line for a module or a class, or, where that is too long, for each method and for many fields."""
    return "{\n" + ",\n".join(entry(owner, members) for owner, members in by.items()) + "\n}\n"


def entry(owner: str, members: list[str]) -> str:
    short = f" {json.dumps(owner)}: {json.dumps(members)}"
    if len(short) < COLUMNS:
        return short
    fields = " ".join(f"{json.dumps(each)}," for each in members if "(" not in each)
    rows = textwrap.wrap(fields, COLUMNS - 2)
    rows += [f"{json.dumps(each)}," for each in members if "(" in each]
    return f" {json.dumps(owner)}: [\n  " + "\n  ".join(rows).removesuffix(",") + "\n ]"


def main(arguments: list[str], folder: Path = FOLDER) -> None:
    parser = ArgumentParser(prog="python -m tests.vllm.releases")
    tasks = parser.add_subparsers(dest="task", required=True)
    record, drop = tasks.add_parser("record"), tasks.add_parser("drop")
    for task in (record, drop):
        task.add_argument("number", help="such as 0.34.0")
    record.add_argument("where", type=Path, help="a wheel, or a folder in which vLLM is installed")
    given = parser.parse_args(arguments)

    releases = recorded(folder)
    if given.task == "record":
        releases[given.number] = contract(sources(given.where))
    else:
        del releases[given.number]
    write(releases, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
