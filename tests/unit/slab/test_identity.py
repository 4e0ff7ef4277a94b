"""Identity of the KV that a tier holds, from the fields that its user gives."""

import os

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.slab.identity import Identified


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "llama-tuned"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "config.json").write_text("{}")
    return made


def identity_of(model=None, revision=None, weights=None):
    return Identified(model=model, revision=revision, weights=weights).identity


def test_a_given_model_and_revision_are_taken():
    assert identity_of("llama", "2026-11") == ("llama", "2026-11")


def test_a_folder_of_weights_has_a_name_and_a_revision(folder, monkeypatch):
    model, revision = identity_of(weights=folder)
    assert model == "llama-tuned" and revision.startswith("files ")
    assert identity_of("mine", weights=str(folder)) == ("mine", revision)
    monkeypatch.chdir(folder)
    assert identity_of(weights=".") == (model, revision)


def test_a_revision_changes_with_weight_files_and_configuration(folder):
    def revision():
        return identity_of(weights=folder)[1]

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


@pytest.mark.parametrize("at", [0, 250_000, 499_999])
def test_weights_whose_files_have_one_time_are_distinguished(folder, at):
    """SOURCE_DATE_EPOCH, nix, ostree. Training changes nearly all bytes; here a run of them, wherever it is."""
    file, seen = folder / "model.safetensors", []
    for byte in b"\0\1":
        content = bytearray(500_000)
        begin = max(0, at - 40_000)
        content[begin : at + 40_000] = bytes([byte]) * (min(500_000, at + 40_000) - begin)
        file.write_bytes(content)
        os.utime(file, (1, 1))
        seen.append(identity_of(weights=folder))
    assert seen[0][0] == seen[1][0] and seen[0][1] != seen[1][1]


def test_weights_that_cannot_be_read_name_nothing(folder, monkeypatch):
    def refuses(*_, **__):
        raise PermissionError("not yours")

    monkeypatch.setattr("pathlib.Path.open", refuses)
    with pytest.raises(ConfigurationError, match="cannot be read: not yours"):
        identity_of(weights=folder)


def test_a_file_may_have_any_name(folder):
    before = identity_of(weights=folder)[1]
    (folder / os.fsdecode(b"\xff.safetensors")).write_bytes(b"more")
    assert identity_of(weights=folder)[1] != before


@pytest.mark.parametrize("text", ["", "step-\udcff"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_text_that_no_digest_takes_is_refused(text, at):
    given: list[str | None] = [None, None]
    given[at] = text
    with pytest.raises(ConfigurationError, match="is a text"):
        Identified(model=given[0], revision=given[1])


def test_one_file_is_enough(folder):
    assert identity_of(weights=folder / "model.safetensors")[0] == "model.safetensors"


@pytest.mark.parametrize("where", ["empty", "nowhere"])
def test_a_folder_without_weights_names_nothing(tmp_path, where):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=rf"{where} has no weight files.*or a model="):
        identity_of(weights=tmp_path / where)


@pytest.mark.parametrize(("given", "missing"), [((None, "1"), "model"), (("m", None), "revision")])
def test_the_missing_field_is_named(given, missing):
    with pytest.raises(ConfigurationError, match=f"{missing} is missing"):
        identity_of(*given)
