"""Fixtures that all tests of replays share."""

import gc
import json

import pytest

from cpu_prefix_cache.tools.cli import main
from tests.unit.replay.logs import TEMPLATE, WORDS
from tests.unit.replay.traces import write


@pytest.fixture(scope="module", autouse=True)
def no_collections_before_replays():
    """A replay begins with a collection of garbage, which takes a quarter second where torch was imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        yield


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer of words and a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(["?", *WORDS])}, unk_token="?")
    words = tokenizers.Tokenizer(model)
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("model")
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": None}))
    return folder


@pytest.fixture
def convert(tmp_path, capsys, tokenizer):
    """Runs the command on these lines. Its exit code, what it printed, and the lines of the trace."""

    def convert(lines, *options, block_tokens=1, with_tokenizer=True):
        log, out = write(tmp_path / "log", lines), tmp_path / "trace"
        out.unlink(missing_ok=True)
        model = ["--tokenizer", str(tokenizer)] if with_tokenizer else []
        to = [] if "--out" in options else ["--out", str(out)]
        code = main(["convert", log, *to, "--block-tokens", str(block_tokens), *model, *options])
        printed = capsys.readouterr()
        trace = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        assert not (tmp_path / "trace.part").exists()
        return code, printed.out + printed.err, trace

    return convert


@pytest.fixture
def run(capsys):
    """Runs a subcommand. Its exit code, and what it printed."""

    def run(*arguments):
        code = main(arguments)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run
