"""The workflows of GitHub run the commands of `.ci/run`, all of them, and have no more rights than they need.

workflow -> targets    of each `make`, once for each value of the job's matrix
         -> actions    each of a major version, which dependabot raises, or of a commit
"""

import re
from itertools import product
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github"
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted((FOLDER / "workflows").glob("*.yml"))}
FORMS = sorted((FOLDER / "ISSUE_TEMPLATE").glob("*.yml"))
EVERY_WORKFLOW = pytest.mark.parametrize("workflow", WORKFLOWS.values(), ids=WORKFLOWS)

MAKE = re.compile(r"\bmake ([\w-]+)")
VALUE = re.compile(r"\$\{\{ *matrix\.(\w+) *\}\}")
PINNED = re.compile(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})")
READS, HAS_IDENTITY = {"contents": "read"}, {"id-token": "write"}
ON = True  # as which YAML reads the key `on`
PYTHON = "Programming Language :: Python :: "


def targets_of(text):
    return set(MAKE.findall(text))


def phony(makefile):
    """The targets that are commands."""
    return set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())


def steps(job):
    """Steps of a job, with each value of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for values in product(*matrix.values()):
        chosen = dict(zip(matrix, values, strict=True))
        for step in job["steps"]:
            yield {name: filled(value, chosen) for name, value in step.items()}


def filled(value, chosen):
    return VALUE.sub(lambda found: chosen[found[1]], value) if isinstance(value, str) else value


def targets(workflow):
    """All that a workflow makes."""
    runs = [step["run"] for job in workflow["jobs"].values() for step in steps(job) if "run" in step]
    return set().union(*map(targets_of, runs))


def actions(workflow):
    return [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]


def rights(workflow):
    """Permissions of the workflow, and of each job that has its own."""
    return [
        workflow.get("permissions"),
        *(job["permissions"] for job in workflow["jobs"].values() if "permissions" in job),
    ]


EXISTING = phony((ROOT / "Makefile").read_text())


@EVERY_WORKFLOW
def test_a_workflow_makes_targets_that_exist(workflow):
    assert targets(workflow) and targets(workflow) <= EXISTING


def test_every_suite_of_ci_run_is_in_a_workflow():
    of_a_change = [workflow for workflow in WORKFLOWS.values() if "pull_request" in workflow[ON]]
    by_hand = targets_of((ROOT / ".ci" / "run").read_text())
    assert {"lint", "test", "test-long"} <= by_hand <= EXISTING
    assert set().union(*map(targets, of_a_change)) == by_hand - {"test-long"} | {"engines"}  # others have a folder
    assert "test-long" in targets(WORKFLOWS["nightly.yml"])


def test_a_target_that_is_missing_is_noticed():
    job = {
        "strategy": {"matrix": {"suite": ["test-vllm", "tests"]}},
        "steps": [{"run": "make ${{ matrix.suite }} A=1"}],
    }
    assert targets({"jobs": {"one": job}}) - EXISTING == {"tests"}
    assert targets_of("make lint\nmake test-nothing") - EXISTING == {"test-nothing"}


def test_every_python_that_is_supported_runs_the_deciding_half():
    text = (ROOT / "pyproject.toml").read_text()
    supported = re.findall(rf'"{PYTHON}(3\.\d+)"', text)
    assert supported == WORKFLOWS["test.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert targets(WORKFLOWS["test.yml"]) == {"test-deciding"}


@EVERY_WORKFLOW
def test_actions_are_pinned(workflow):
    assert actions(workflow) and all(map(PINNED.fullmatch, actions(workflow)))


@pytest.mark.parametrize("action", ["actions/checkout", "actions/checkout@main", "a/b@v1.x", "a/b@abcdef0"])
def test_an_action_that_is_not_pinned_is_noticed(action):
    assert not PINNED.fullmatch(action)


@EVERY_WORKFLOW
def test_a_workflow_reads_the_code_and_no_secret(workflow):
    of_all, *of_jobs = rights(workflow)
    assert of_all == READS and all(each in (READS, HAS_IDENTITY) for each in of_jobs)
    assert "secrets" not in str(workflow)


def test_only_the_release_has_an_identity():
    assert [name for name, workflow in WORKFLOWS.items() if HAS_IDENTITY in rights(workflow)] == ["release.yml"]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_form_has_fields(form):
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= content.keys()
    fields = [each["id"] for each in content["body"] if each["type"] != "markdown"]
    assert fields and len(fields) == len(set(fields))


def test_other_settings_are_read():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert targets_of(hooks[0]["entry"]) == {"lint"}
    updates = yaml.safe_load((FOLDER / "dependabot.yml").read_text())["updates"]
    assert [each["package-ecosystem"] for each in updates] == ["github-actions"]
