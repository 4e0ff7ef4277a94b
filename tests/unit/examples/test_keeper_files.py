"""The unit and the manifest of a keeper start the command as it is, at one socket."""

import shlex
from pathlib import Path

import yaml

from cpu_prefix_cache.messages.sizes import parse_bytes
from cpu_prefix_cache.tools.cli import parser

FOLDER = Path(__file__).parents[3] / "examples" / "keeper"


def options(words):
    return parser().parse_args(words[words.index("keep") :])


def of_the_unit():
    lines = (FOLDER / "cpu-prefix-cache-keeper.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def of_the_manifest():
    return yaml.safe_load((FOLDER / "daemonset.yaml").read_text())["spec"]["template"]["spec"]


def test_the_unit_keeps_its_socket_over_a_restart():
    unit = of_the_unit()
    given = options(shlex.split(unit["ExecStart"]))
    assert given.socket.startswith(f"/run/{unit['RuntimeDirectory']}/")
    assert unit["RuntimeDirectoryPreserve"] == "restart" and unit["Restart"] == "always"
    assert parse_bytes(given.host_bytes)


def test_the_manifest_has_its_socket_in_a_folder_of_the_node():
    pod = of_the_manifest()
    (keeper,), (volume,) = pod["containers"], pod["volumes"]
    (mount,) = keeper["volumeMounts"]
    given = options(keeper["command"])
    assert given.socket.startswith(f"{mount['mountPath']}/") and "hostPath" in volume
    assert parse_bytes(given.host_bytes)


def test_both_have_one_address():
    words = shlex.split(of_the_unit()["ExecStart"])
    assert options(words).socket == options(of_the_manifest()["containers"][0]["command"]).socket
