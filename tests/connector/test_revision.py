"""A revision of the weights in a file: two engines of a fleet that is sent new weights share again."""

import logging
import os

import pytest

from connector.tier.options import TierOption
from connector.tier.revision import MAX_BYTES, read_revision, reset
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.testing import MemoryStore
from tests.unit.stores.test_shared import engine_with, serve, shared


def engines_that_were_reset(*files):
    store, found = MemoryStore(), []
    for file in files:
        engine = engine_with(shared(store))
        engine.step()
        reset(engine.host.cache, file)
        wrong, seen = serve(engine, number=12)
        engine.host.close()
        assert wrong == []
        found.append(seen.found > 0)
    return found


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "revision"
    path.write_text("step 1200\n")
    return path


def test_engines_with_equal_revision_files_share(file):
    same = file.with_name("of another machine")
    same.write_text("step 1200")
    other = file.with_name("other")
    other.write_text("step 1201")
    assert engines_that_were_reset(str(file), str(same), str(other)) == [False, True, False]


@pytest.mark.parametrize("text", [None, "", " \n", b"\xff"])
def test_a_file_that_names_nothing_is_refused_at_start_and_shares_with_nobody_later(file, text, caplog):
    file.unlink()
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError, match=r"cannot be read|is empty; write a name"):
        read_revision(str(file))
    with caplog.at_level(logging.ERROR):
        assert engines_that_were_reset(str(file), str(file)) == [False, False]
    assert "nothing is shared until the next reset" in caplog.text


def test_a_pipe_keeps_nobody_waiting(file):
    """Nobody writes into it."""
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigurationError, match="is no regular file"):
        read_revision(str(file))
    assert engines_that_were_reset(str(file), str(file)) == [False, False]


def test_a_file_that_is_no_name_is_not_read_whole(file):
    file.write_text("x" * MAX_BYTES)
    assert read_revision(str(file)) == "x" * MAX_BYTES
    file.write_text("x" * (MAX_BYTES + 1))
    with pytest.raises(ConfigurationError, match="more than 4096 bytes; write a name"):
        read_revision(str(file))


def test_it_is_the_revision_at_the_start(file):
    option = TierOption.of({"kind": "redis", "store": "redis://host", "revision_file": str(file)})

    def never():
        raise AssertionError("the weights are not asked for")

    assert option.of_engine(0, model="m", weights=never, hash="sha256").revision == "step 1200"


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"kind": "redis", "store": "redis://host", "revision": "1"}, "leave one of them out"),
        ({"kind": "file", "path": "/nvme", "bytes": 5}, "unknown key 'revision_file' in a tier"),
    ],
)
def test_it_is_refused_where_it_would_mean_nothing(file, said, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        TierOption.of({**said, "revision_file": str(file)})
