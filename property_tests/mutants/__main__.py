"""`make mutants`: draws faults, tries each, prints those that no test saw."""

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tqdm import tqdm

from property_tests.mutants.faults import Content, Fault
from property_tests.mutants.sample import by_file, draw, population, read, write
from property_tests.mutants.subjects import SUBJECTS
from property_tests.mutants.trial import Outcome, Trial

_trial: Trial


def main() -> None:
    options = _options()
    subject = SUBJECTS[options.of]
    outcomes = _earlier(options.results)
    with contextlib.nullcontext(options.scratch) if options.scratch else tempfile.TemporaryDirectory() as scratch:
        trial = Trial(options.root, subject, Path(scratch), options.examples)
        faults = population(trial.tree, subject)
        chosen, gone = read(options.list, faults) if options.list else (draw(faults, options.seed, options.count), [])
        if options.write:
            write(options.write, chosen)
        print(f"{len(chosen)} of {len(faults)} faults, {len(trial.seconds)} tests", flush=True)
        for test in trial.failing:
            print(f"left out, as it fails without a fault: {test}", flush=True)
        new = [fault for fault in chosen if fault.content not in outcomes]
        for fault, outcome in tqdm(_tried(trial, new, options.jobs), total=len(new), disable=None):
            outcomes[fault.content] = outcome
            _keep(options.results, fault, outcome)
    _print(chosen, outcomes, gone)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m property_tests.mutants", description=__doc__)
    parser.add_argument("--of", choices=SUBJECTS, default="deciding", help="subject of the mutants")
    parser.add_argument("--seed", type=int, default=1, help="which faults are drawn")
    parser.add_argument("--count", type=int, default=100, help="how many")
    parser.add_argument("--list", type=Path, help="take the faults of this file and draw none")
    parser.add_argument("--write", type=Path, help="write the faults to this file, for --list on another day")
    parser.add_argument("--results", type=Path, help="JSON lines, one a fault; a run that was cut off goes on")
    parser.add_argument(
        "--scratch", type=Path, help="keep the measured copy of the tree here, and take it if it is there"
    )
    parser.add_argument("--examples", type=float, default=1 / 3, help="share of the examples of property tests")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the tree")
    return parser.parse_args()


def _tried(trial: Trial, faults: list[Fault], jobs: int) -> Iterator[tuple[Fault, Outcome]]:
    fork = multiprocessing.get_context("fork")  # a trial is not copied to its processes
    with ProcessPoolExecutor(jobs, mp_context=fork, initializer=_start, initargs=(trial,)) as processes:
        yield from zip(faults, processes.map(_try, faults), strict=True)


def _start(trial: Trial) -> None:
    global _trial  # of a process of the pool
    _trial = trial.of_this_process()


def _try(fault: Fault) -> Outcome:
    return _trial.run(fault)


def _earlier(results: Path | None) -> dict[Content, Outcome]:
    if results is None or not results.exists():
        return {}
    rows = map(json.loads, results.read_text().splitlines())
    return {tuple(row["content"]): Outcome(row["result"], row["by"], row["seconds"]) for row in rows}


def _keep(results: Path | None, fault: Fault, outcome: Outcome) -> None:
    if results is not None:
        place = {"line": fault.lines.start, "content": fault.content}
        with results.open("a") as lines:
            lines.write(json.dumps({**dataclasses.asdict(outcome), **place}) + "\n")


def _print(chosen: list[Fault], outcomes: dict[Content, Outcome], gone: list[str]) -> None:
    for file, faults in sorted(by_file(chosen).items()):
        count = Counter(outcomes[fault.content].result for fault in faults)
        print(f"{file:<50} {count['killed']:>3} of {len(faults):>3}")
    killed = sum(outcomes[fault.content].result == "killed" for fault in chosen)
    print(f"{'killed':<50} {killed:>3} of {len(chosen):>3}")
    for line in gone:
        print("gone:", line)
    for fault in chosen:
        if outcomes[fault.content].result != "killed":
            print(f"{outcomes[fault.content].result}: {fault}")


if __name__ == "__main__":
    main()
