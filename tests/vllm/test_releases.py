"""Contracts on file come back as they were recorded, also what a release has lost."""

import json
import shutil
from itertools import permutations
from pathlib import Path

import pytest
import vllm
from hypothesis import given
from hypothesis import strategies as st

from tests.vllm.contract import Contract, abstract, methods, names
from tests.vllm.releases import FOLDER, GONE, changed, changes, main, recorded, text, write

RELEASES = recorded()
NOTHING = "nothing"
PAIRS = list(permutations([NOTHING, *RELEASES], 2))
HERE = vllm.__version__.partition("+")[0]

OLD = Contract(
    {("Pool", "blocks"), ("Pool", "touch(self, blocks)"), ("Pool", "free()"), ("Queue", "abstract next(self)")}
)
NEW = Contract({("Pool", "blocks"), ("Pool", "touch(self, blocks, **by)"), ("Queue", "next(self)"), ("module", "Pool")})
CHANGES = {
    "Pool": ["-free()", "-touch(self, blocks)", "touch(self, blocks, **by)"],
    "Queue": ["-abstract next(self)", "next(self)"],
    "module": ["Pool"],
}

MEMBERS = [f"{word}{end}" for word in ("a", "b" * 70, "abstract c") for end in ("", "()", "(self)", "(self, *a)")]
CONTRACTS = st.frozensets(st.tuples(st.sampled_from(["Pool", "Queue", "vllm.pool"]), st.sampled_from(MEMBERS)))


def there_and_back(before: Contract, after: Contract) -> Contract:
    return changed(before, json.loads(text(changes(before, after))))


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_release_differs_in_what_it_adds_loses_and_changes():
    assert changes(OLD, NEW) == CHANGES
    assert changed(OLD, CHANGES) == NEW


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_each_release_comes_back_from_its_difference_to_any_other(before, after):
    releases = {NOTHING: Contract(), **RELEASES}
    assert there_and_back(releases[before], releases[after]) == releases[after]


@given(CONTRACTS, CONTRACTS)
def test_any_contract_comes_back_from_its_difference_to_any_other(before, after):
    assert there_and_back(before, after) == after


@pytest.mark.parametrize(("before", "after"), [pair for pair in PAIRS if NOTHING not in pair])
def test_without_what_a_release_has_lost_it_is_another(before, after):
    by = changes(RELEASES[before], RELEASES[after])
    added = {owner: [each for each in found if not each.startswith(GONE)] for owner, found in by.items()}
    assert added != by
    assert changed(RELEASES[before], added) > RELEASES[after]


@pytest.mark.parametrize("before", [Contract(), NEW, OLD - {("Pool", "free()")}, OLD | {("module", "Pool")}])
def test_changes_to_another_release_are_refused(before):
    with pytest.raises(ValueError, match="changes to another release than the one before"):
        changed(before, CHANGES)


def test_members_have_a_name_and_parameters():
    assert names(OLD, "Pool") == {"blocks", "touch", "free"}
    assert methods(NEW, "Pool") == {"touch": ["self", "blocks", "**by"]}
    assert methods(OLD, "Pool")["free"] == []
    assert (abstract(OLD, "Queue"), abstract(NEW, "Queue")) == ({"next"}, set())
    assert names(OLD, "module") == set()


def test_files_are_written_as_they_are(tmp_path):
    write(RELEASES, tmp_path)
    assert files(tmp_path) == files(FOLDER)


@pytest.mark.parametrize("number", RELEASES)
def test_a_release_that_is_dropped_takes_nothing_of_others_with_it(number, tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "contracts")
    main(["drop", number], folder)
    assert recorded(folder) == {each: found for each, found in RELEASES.items() if each != number}


def test_the_release_that_runs_here_is_recorded_as_on_file(tmp_path):
    write({**RELEASES, HERE: next(iter(RELEASES.values())), "0.100.0": Contract()}, tmp_path)
    assert list(recorded(tmp_path)) == [*RELEASES, "0.100.0"]
    main(["record", HERE, str(Path(vllm.__file__).parents[1])], tmp_path)
    main(["drop", "0.100.0"], tmp_path)
    assert files(tmp_path) == files(FOLDER)
