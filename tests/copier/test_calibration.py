"""What was measured once is kept, and used for the device and the versions it is of, and for no others."""

import dataclasses
import json

import pytest
import torch

from cpu_prefix_cache.copier import calibration
from cpu_prefix_cache.copier.calibration import SHIPPED, Calibration, calibration_for, save

CUDA = torch.device("cuda", 0)


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU/9")
    monkeypatch.setattr(calibration, "versions", lambda: "torch 9")
    return Calibration("A GPU/9", "torch 9", 50.0, 51.0, 49.0, 50.0, direct_bytes=512 * 1024)


def test_what_was_stored_is_gone_by(tmp_path, found):
    path = save(found, tmp_path)
    assert path.parent == tmp_path and path.name == "copies-a-gpu-9.json"
    assert calibration_for(CUDA, tmp_path) == (found, f"from {path}")


def test_without_one_what_is_shipped_is(tmp_path, found):
    chosen, origin = calibration_for(CUDA, tmp_path)
    assert chosen is SHIPPED and "cpu-prefix-cache bench" in origin


def test_one_of_other_versions_or_another_device_is_not(tmp_path, found):
    for other in ({"versions": "torch 8"}, {"device": "a gpu 9"}):
        save(dataclasses.replace(found, **other), tmp_path)
        chosen, origin = calibration_for(CUDA, tmp_path)
        assert chosen is SHIPPED and "is of" in origin


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "{}", '{"version": 1}', '{"version": 2, "device": "A GPU/9"}', '{"version": 1, "size": 3}', "\x00"],
)
def test_a_file_that_is_none_is_said_and_not_used(tmp_path, found, caplog, text):
    save(found, tmp_path).write_text(text)
    assert calibration_for(CUDA, tmp_path)[0] is SHIPPED
    assert "no calibration" in caplog.text


def test_a_number_that_is_none_is_not_used_either(tmp_path, found, caplog):
    path = save(found, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "direct_bytes": "many"}))
    assert calibration_for(CUDA, tmp_path)[0] is SHIPPED
    assert "no calibration" in caplog.text


def test_tensors_in_host_memory_need_none(tmp_path):
    assert calibration_for(torch.device("cpu"), tmp_path) == (SHIPPED, "shipped")


def test_it_says_what_it_is(found):
    assert str(found) == "A GPU/9 (torch 9): link 50.0/51.0 GB/s store/load, staged 49.0/50.0, direct from 512 KiB"


def test_it_is_kept_where_users_keep_caches(tmp_path, monkeypatch, found):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert save(found) == tmp_path / "cpu-prefix-cache" / "copies-a-gpu-9.json"
