"""Whose KV a tier holds, by what its user gives."""

import os

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.slab.identity import identity_of


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "llama-tuned"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "config.json").write_text("{}")
    return made


def test_what_is_given_is_taken():
    assert identity_of("llama", "2026-11", None) == ("llama", "2026-11")


def test_a_folder_of_weights_has_a_name_and_a_revision(folder, monkeypatch):
    model, revision = identity_of(None, None, folder)
    assert model == "llama-tuned" and revision.startswith("files ")
    assert identity_of("mine", None, str(folder)) == ("mine", revision)
    monkeypatch.chdir(folder)
    assert identity_of(None, None, ".") == (model, revision)


def test_a_revision_changes_with_weight_files_and_configuration(folder):
    def revision():
        return identity_of(None, None, folder).revision

    seen = [revision()]
    (folder / "README.md").write_text("nothing that is computed with")
    assert revision() == seen[-1]
    (folder / "config.json").write_text('{"rope_theta": 5.0}')
    seen.append(revision())
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"more")
    seen.append(revision())
    os.utime(folder / "model.safetensors", ns=(5, 5))
    seen.append(revision())
    assert len(set(seen)) == 4


def test_one_file_is_enough(folder):
    assert identity_of(None, None, folder / "model.safetensors").model == "model.safetensors"


@pytest.mark.parametrize("where", ["empty", "nowhere"])
def test_a_folder_without_weights_names_nothing(tmp_path, where):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=rf"{where} has no weight files.*or a model="):
        identity_of(None, None, tmp_path / where)


@pytest.mark.parametrize(("given", "missing"), [((None, "1"), "model"), (("m", None), "revision")])
def test_what_is_missing_is_named(given, missing):
    with pytest.raises(ConfigurationError, match=f"{missing} is missing"):
        identity_of(*given, None)
