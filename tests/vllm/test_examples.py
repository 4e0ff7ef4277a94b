"""The files of examples/vllm against a running engine: its /metrics has the names and labels of the board and of
the alert rules, and vLLM understands the command lines.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.instrumentator.metrics import attach_router
from vllm.utils.argparse_utils import FlexibleArgumentParser

from connector.vllm.metrics import OFFLOADING, PREFIX
from connector.vllm.settings import checked_options
from cpu_prefix_cache import ConfigurationError
from tests.unit.examples.vllm_alerts import CASES, ENGINE
from tests.vllm.real_cache import HOST_BYTES, PROMPTS, CachedEngine, folder_of

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "vllm"
FREE = "$"  # a value of Grafana's variables, which fits anything
ADDED = {"job", "instance", "le"}  # labels that Prometheus adds, or that a histogram has

Series = Mapping[str, Mapping[str, set[str]]]  # from a name to its labels, and to the values of each


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Series:
    """Series of /metrics after two prompts, of an engine with a tier."""
    tier = dict(kind="file", path=str(tmp_path_factory.mktemp("tier")), bytes=4 * HOST_BYTES, revision="1")
    with CachedEngine(folder_of("llama"), engine=dict(log_stats=True), offload="eager", tier=tier) as engine:
        engine.answer(PROMPTS[:2])
        engine.rest()
        return series_of(metrics_of_a_server())


def metrics_of_a_server() -> str:
    """By the way in which vLLM's server gives them out."""
    app = FastAPI()
    attach_router(app)
    return TestClient(app).get("/metrics").text


def series_of(text: str) -> Series:
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def expressions() -> list[str]:
    groups = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]
    panels = json.loads((FILES / "grafana.json").read_text())["panels"]
    return [rule["expr"] for group in groups for rule in group["rules"]] + [
        target["expr"] for panel in panels for target in panel.get("targets", ())
    ]


def missing(expression: str, served: Series) -> Iterable[str]:
    """Names and labels of an expression that the server does not have."""
    asked = re.findall(r"(vllm:\w+)(?:{([^}]*)})?", expression)
    assert asked, expression
    for name, selector in asked:
        if name not in served:
            yield name
            continue
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', selector):
            for value in values.split("|"):
                if not value.startswith(FREE) and value not in served[name].get(label, ()):
                    yield f"{name}: {label}={value}"
        grouped = re.findall(r"(?:by|ignoring) \(([\w, ]+)\)", expression)
        labels = {label for each in grouped for label in each.split(", ")} - ADDED
        of_any = {label for other, _ in asked for label in served.get(other, ())}
        yield from (f"label {label}" for label in sorted(labels - of_any))


@pytest.mark.parametrize("expression", expressions())
def test_the_server_has_all_metrics_of_board_and_rules(served, expression):
    assert list(missing(expression, served)) == []


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("rate(vllm:cpu_prefix_cache_hit_tokens[5m])", "vllm:cpu_prefix_cache_hit_tokens"),  # without _total
        ('vllm:cpu_prefix_cache_tier_state{state="broken"}', "vllm:cpu_prefix_cache_tier_state: state=broken"),
        ('vllm:cpu_prefix_cache_tier_state{state=~"paused|broken"}', "vllm:cpu_prefix_cache_tier_state: state=broken"),
        ('vllm:cpu_prefix_cache_off{rank="0"}', "vllm:cpu_prefix_cache_off: rank=0"),
        ("sum by (rank) (vllm:cpu_prefix_cache_off)", "label rank"),
    ],
)
def test_a_name_a_value_or_a_label_that_does_not_exist_would_be_noticed(served, expression, found):
    assert list(missing(expression, served)) == [found]


def test_alerts_are_tried_with_series_as_the_server_has_them(served):
    """So that what is compared in a rule has the same labels there."""
    for case in CASES.values():
        for told in (*case.fires, *case.quiet):
            name, _, own = told.partition("{")
            labels = {*ENGINE, *re.findall(r"(\w+)=", own)}
            assert set(served[f"vllm:{name}"]) == labels, told


def test_the_board_shows_all_metrics_of_the_cache(served):
    """Metrics that are in other numbers, too, are left out, and those of what few clients do."""
    prefixes = (PREFIX, OFFLOADING)
    told = {name for name in served if name.startswith(prefixes) and not name.endswith("_created")}
    asked = {name for each in expressions() for name in re.findall(r"vllm:\w+", each)}
    assert told - asked == {
        "vllm:cpu_prefix_cache_next_use_hints_total",
        "vllm:cpu_prefix_cache_union_misses_total",
        *(
            f"vllm:cpu_prefix_cache_tier_{rest}"
            for rest in ("prefetch_hints_total", "found_chunks_total", "resident_blocks", "capacity_blocks")
        ),
    }


# Command lines


def commands() -> list[list[str]]:
    compose = yaml.safe_load((FILES / "compose.yaml").read_text())
    deployment, _ = yaml.safe_load_all((FILES / "kubernetes.yaml").read_text())
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    return [compose["services"]["vllm"]["command"], container["args"]]


def options_of(command: list[str]) -> Mapping[str, object]:
    """As vLLM and the connector read them."""
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(command)
    return checked_options(SimpleNamespace(kv_transfer_config=given.kv_transfer_config))


@pytest.mark.parametrize("command", commands(), ids=["compose", "kubernetes"])
def test_vllm_understands_the_command(command):
    assert options_of(command) == {"cpu_bytes_to_use": 48 * 2**30, "policy": "adaptive"}
    with pytest.raises(ConfigurationError, match="unknown option"):
        options_of([each.replace("cpu_bytes_to_use", "cpu_bytes") for each in command])
