"""Sources are found in a folder or fetched, checked against what their commit has, and missed in a sentence."""

import http.server
import tarfile
import threading
from dataclasses import replace
from functools import partial

import pytest

from tests.engines import sources
from tests.engines.sources import SOURCES, VARIABLE, CannotBeHad, Source, digest, fetch, found, home

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOWHERE = "http://127.0.0.1:9"  # where nobody listens


@pytest.fixture
def server(tmp_path):
    """A host that has one archive, as GitHub packs it: its address, and the source that it is."""
    folder = tmp_path / "packed" / f"engine-{COMMIT}"
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "scheduler.py").write_text("STEPS = 1\n")
    (folder / "README.md").write_text("an engine\n")
    source = Source("engine", "somebody/engine", COMMIT, "engine", digest(folder, "engine"))
    archive = tmp_path / "served" / "somebody" / "engine" / "archive" / f"{COMMIT}.tar.gz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as files:
        files.add(folder, folder.name)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "served")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{host.server_port}", source
        host.shutdown()


@pytest.fixture
def nothing_here(tmp_path, monkeypatch):
    """Neither a folder that is named nor one beside the repository. The folder into which is fetched."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sources, "BESIDE", tmp_path / "beside")
    monkeypatch.setattr(sources, "FETCHED", tmp_path / "fetched")
    return tmp_path / "fetched"


def test_a_source_is_fetched_and_found_from_then_on(server, nothing_here):
    host, source = server
    assert found(source) is None
    assert fetch(source, nothing_here, host) == nothing_here / "engine" == found(source)
    assert (nothing_here / "engine" / "engine" / "scheduler.py").read_text() == "STEPS = 1\n"
    assert [path.name for path in nothing_here.iterdir()] == ["engine"], "nothing else is left"


def test_other_files_than_those_of_the_commit_are_refused(server, nothing_here):
    host, source = server
    with pytest.raises(CannotBeHad, match=f"have the sha256 {source.sha256}, and not 00"):
        fetch(replace(source, sha256="0" * 64), nothing_here, host)
    assert list(nothing_here.iterdir()) == []


@pytest.mark.parametrize("commit", ["f" * 40, COMMIT])
def test_without_an_answer_the_sentence_names_the_way_without_a_network(server, nothing_here, commit):
    host, source = server
    away = replace(source, commit=commit)
    with pytest.raises(CannotBeHad, match=f"{commit}.*let {VARIABLE} name a folder that has engine"):
        fetch(away, nothing_here, host if commit != COMMIT else NOWHERE)
    assert list(nothing_here.iterdir()) == []


def test_a_page_in_place_of_an_archive_is_refused(server, nothing_here, tmp_path):
    host, source = server
    (tmp_path / "served" / "somebody" / "engine" / "archive" / f"{COMMIT}.tar.gz").write_text("<html>rate limit</html>")
    with pytest.raises(CannotBeHad, match=f"let {VARIABLE} name a folder"):
        fetch(source, nothing_here, host)


def test_a_named_folder_comes_first_and_may_have_a_folder_or_an_archive(server, nothing_here, tmp_path, monkeypatch):
    _, source = server
    named = tmp_path / "named"
    for place in (named, nothing_here):
        (place / "engine").mkdir(parents=True)
    assert found(source) == nothing_here / "engine"
    monkeypatch.setenv(VARIABLE, str(named))
    assert found(source) == named / "engine"
    (named / "engine").rmdir()
    packed = tmp_path / "served" / "somebody" / "engine" / "archive" / f"{COMMIT}.tar.gz"
    (named / "engine_0123456.tar.gz").write_bytes(packed.read_bytes())
    assert digest(home(found(source), "engine"), "engine") == source.sha256
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="which is no folder"):
        found(source)


def test_one_that_cannot_be_had_fails_the_command_and_the_others_are_fetched(server, nothing_here, monkeypatch, capsys):
    host, source = server
    lost = replace(source, name="lost", repository="somebody/lost")
    monkeypatch.setattr(sources, "SOURCES", (lost, source))
    assert sources.main(nothing_here, host) == 1
    printed = capsys.readouterr()
    assert "lost: CANNOT BE HAD: " in printed.err and f"engine: {nothing_here / 'engine'}\n" in printed.out
    monkeypatch.setattr(sources, "SOURCES", (source,))
    assert sources.main(nothing_here, NOWHERE) == 0, "it is here, and nothing is fetched"
    (nothing_here / "engine" / "engine" / "scheduler.py").write_text("STEPS = 2\n")
    assert sources.main(nothing_here, NOWHERE) == 0
    assert f"which is not commit {COMMIT[:9]}" in capsys.readouterr().out


def test_addresses_are_of_commits():
    assert len({source.url() for source in SOURCES}) == len(SOURCES) == 3
    for source in SOURCES:
        assert source.url() == f"https://github.com/{source.repository}/archive/{source.commit}.tar.gz"
        assert len(source.commit) == 40 and len(source.sha256) == 64
