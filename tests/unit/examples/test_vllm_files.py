"""The files of examples/vllm agree with each other, and each alert fires on its own trouble and on nothing else.

tests/vllm/test_examples.py compares them with a running server: names, labels, options.
"""

import copy
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.examples.vllm_alerts import CASES, ENGINE

yaml = pytest.importorskip("yaml")

FILES = Path(__file__).parents[3] / "examples" / "vllm"
ALERTS, BOARD = FILES / "alerts.yml", FILES / "grafana.json"
GIB = 2**30
LEAST_FOR_THE_ENGINE = 16 * GIB  # host memory of a vLLM server, without a cache
VARIABLES = {"$__rate_interval": "1m", "$__range": "1h", "$model": ".*", "$engine": ".*"}


def compose():
    return yaml.safe_load((FILES / "compose.yaml").read_text())


def kubernetes():
    return {each["kind"]: each for each in yaml.safe_load_all((FILES / "kubernetes.yaml").read_text())}


def rules():
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def queries(board):
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


# Sizes


def size(text):
    """Docker's 72g and Kubernetes' 72Gi are both GiB."""
    return int(re.fullmatch(r"(\d+)(?:g|Gi)", text)[1]) * GIB


def region(arguments):
    transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return transfer["kv_connector_extra_config"]["cpu_bytes_to_use"]


def sizes_of_compose(file):
    server = file["services"]["vllm"]
    return region(server["command"]), size(server["mem_limit"]), size(server["shm_size"])


def sizes_of_kubernetes(files):
    pod = files["Deployment"]["spec"]["template"]["spec"]
    [container], [volume] = pod["containers"], pod["volumes"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
    assert volume["emptyDir"]["medium"] == "Memory"
    memory = container["resources"]
    assert memory["requests"]["memory"] == memory["limits"]["memory"]
    return region(container["args"]), size(memory["limits"]["memory"]), size(volume["emptyDir"]["sizeLimit"])


def problems(region, limit, shared):
    if limit < region + LEAST_FOR_THE_ENGINE:
        yield "the memory limit leaves the engine too little"
    if shared > limit - region:
        yield "what is in /dev/shm does not fit into the limit beside the region"


@pytest.mark.parametrize("sizes", [sizes_of_compose(compose()), sizes_of_kubernetes(kubernetes())])
def test_region_engine_and_shared_memory_fit_into_the_limit(sizes):
    assert list(problems(*sizes)) == []
    region, limit, shared = sizes
    assert len(list(problems(2 * region, limit, shared))) == 2, "a larger region would be noticed"


def test_both_files_start_the_same_server():
    assert sizes_of_compose(compose()) == sizes_of_kubernetes(kubernetes())
    [container] = kubernetes()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == compose()["services"]["vllm"]["command"]


def test_files_that_are_mounted_or_built_from_are_there():
    services = compose()["services"]
    mounted = [volume.split(":")[0] for each in services.values() for volume in each.get("volumes", ())]
    assert [name for name in mounted if name.startswith(".") and not (FILES / name).is_file()] == []
    build = services["vllm"]["build"]
    root = (FILES / build["context"]).resolve()
    copied = re.findall(r"(?m)^COPY (.+) \S+$", (root / build["dockerfile"]).read_text())
    assert [name for names in copied for name in names.split() if not (root / name).exists()] == []


def test_the_service_finds_the_pods():
    files = kubernetes()
    pods = files["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert files["Service"]["spec"]["selector"] == files["Deployment"]["spec"]["selector"]["matchLabels"] == pods


# Rules and queries


@pytest.fixture
def promtool(tmp_path):
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not on the PATH; Debian's package prometheus has it")

    def run(*words, **files):
        for name, content in files.items():
            (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(content))
        done = subprocess.run([tool, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_the_configuration_and_its_rules_are_valid(promtool):
    code, said = promtool("check", "config", str(FILES / "prometheus.yml"))
    assert code == 0 and f"{len(CASES)} rules found" in said, said


def as_rules(expressions):
    named = [{"record": f"query:{at}", "expr": each} for at, each in enumerate(expressions)]
    return {"groups": [{"name": "queries", "rules": named}]}


def without_variables(expression):
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def test_the_boards_queries_are_valid(promtool):
    expressions = [without_variables(each) for each in queries(json.loads(BOARD.read_text()))]
    assert len(expressions) > 20 and not any("$" in each for each in expressions)
    code, said = promtool("check", "rules", "rules.yml", rules=as_rules(expressions))
    assert code == 0, said
    code, _ = promtool("check", "rules", "rules.yml", rules=as_rules([expressions[0] + ")"]))
    assert code != 0, "a query that is not valid would be noticed"


def course(series, values):
    name, _, own = series.partition("{")
    labels = [f'{label}="{value}"' for label, value in ENGINE.items()] + [own.removesuffix("}")] * bool(own)
    return {"series": f"vllm:{name}{{{','.join(labels)}}}", "values": values}


def story(alert, case, fires):
    rule = rules()[alert]
    expected = {"exp_labels": {**rule["labels"], **ENGINE, **case.labels}, "exp_annotations": rule["annotations"]}
    told = case.fires if fires else case.quiet
    asked = {"alertname": alert, "eval_time": f"{case.minutes}m", "exp_alerts": [expected] if fires else []}
    return {"interval": "1m", "input_series": [course(*each) for each in told.items()], "alert_rule_test": [asked]}


def stories(cases):
    tests = [story(alert, case, fires) for alert, case in cases.items() for fires in (True, False)]
    return {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}


def test_every_alert_has_a_course_that_fires_it():
    assert list(CASES) == list(rules())


def test_alerts_fire_on_what_they_are_for_and_on_nothing_else(promtool):
    code, said = promtool("test", "rules", "stories.yml", stories=stories(CASES))
    assert code == 0, said


def test_an_alert_that_fires_too_often_or_too_seldom_would_be_noticed(promtool):
    wrong = {alert: case._replace(fires=case.quiet, quiet=case.fires) for alert, case in CASES.items()}
    code, said = promtool("test", "rules", "stories.yml", stories=stories(wrong))
    assert code != 0
    assert Counter(re.findall(r"alertname: (\w+)", said)) == dict.fromkeys(CASES, 2), said


# The board


def overlaps(one, other):
    a, b = one["gridPos"], other["gridPos"]
    return all(a[at] < b[at] + b[size] and b[at] < a[at] + a[size] for at, size in (("x", "w"), ("y", "h")))


def test_no_panel_covers_another():
    panels = json.loads(BOARD.read_text())["panels"]
    pairs = [(one, other) for at, one in enumerate(panels) for other in panels[:at]]
    assert not any(overlaps(*pair) for pair in pairs)
    moved = copy.deepcopy(panels[1])
    moved["gridPos"]["x"] -= 1
    assert overlaps(panels[0], moved)


def test_every_panel_has_a_description():
    panels = [panel for panel in json.loads(BOARD.read_text())["panels"] if panel["type"] != "row"]
    assert [panel["title"] for panel in panels if not panel["description"]] == []
    assert len({panel["id"] for panel in panels}) == len(panels)


def added_up(query):
    """Whether numbers of a pool are added over all engines, each of which shows a whole pool that it has with others.
    A share is right, whatever its parts are multiplied by.
    """
    pool = "evicted_chunks_total|(capacity|ready|resident|pinned)_blocks"
    return " / " not in query and re.search(rf"sum\((rate\()?vllm:cpu_prefix_cache_({pool})", query) is not None


def test_no_panel_counts_a_keepers_pool_once_for_each_engine():
    asked = [query for query in queries(json.loads(BOARD.read_text())) if "_blocks" in query or "evicted" in query]
    assert len(asked) == 6 and not any(map(added_up, asked))
    assert sum(added_up(query.replace("sum by (instance, engine) (", "sum(")) for query in asked) == 5
