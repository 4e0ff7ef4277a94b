"""Refusals of the example: one sentence, with exit status 2, before it answers anything.

Three kinds of bad input: options, files of prompts, checkpoints. Failures in the middle of a run are in
test_offline_generation_cut_off.py.
"""

import json
import shutil

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

import offline_generation
import offline_generation_run
from builtin_models import build_model
from connector.transformers import PrefixCachedGenerator, PromptRefused
from cpu_prefix_cache import ConfigurationError
from offline_generation_inputs import Prompt, check_prompt


@pytest.fixture
def refuse(monkeypatch, capsys):
    """The sentence that a call of the example ends with."""

    def never(*_):
        raise AssertionError("a prompt was answered before everything was checked")

    def call(*options):
        assert offline_generation.main([str(option) for option in options]) == 2
        said = capsys.readouterr()
        *_, message = said.err.strip().splitlines()
        assert message.startswith("error: ")
        assert said.out == ""
        return message

    monkeypatch.setattr(offline_generation_run, "check", never)
    return call


OPTIONS = {
    "no GPU": (["--device", "cuda"], "no CUDA device"),
    "no device block": (["--device-blocks", "0"], "--device-blocks must be at least 1, got 0"),
    "too few device blocks": (["--device-blocks", "3"], "device blocks, but the pool has 3"),
    "too many device blocks": (["--device-blocks", "999999999"], "ask for at most"),
    "a number of blocks that no machine has": (["--device-blocks", "9" * 30], "ask for at most"),
    "no host memory": (["--host-bytes", "0"], "--host-bytes must be at least 1"),
    "less than a byte": (["--host-bytes", "0.5"], "--host-bytes must be at least 1"),
    "more memory than there is": (["--host-bytes", "900TiB"], "ask for at most"),
    "the most that can be written": (["--host-bytes", "9" * 15 + "PiB"], "ask for at most"),
    "a size without a number": (["--host-bytes", ""], "a size is a number of bytes such as 64GiB"),
    "a negative size": (["--host-bytes", "-1"], "a size is a number of bytes"),
    "a size of 401 digits": (["--host-bytes", "1" + 400 * "0"], "in at most 15 digits"),
    "a unit that is none": (["--host-bytes", "2iB"], "got '2iB'"),
    "no documents": (["--documents", "0"], "--documents must be at least 1"),
    "more documents than there are": (["--documents", "10000"], "ask for no more"),
    "no rounds": (["--rounds", "0"], "--rounds must be at least 1"),
    "fewer rounds than none": (["--rounds", "-1"], "--rounds must be at least 1, got -1"),
    "a model of no length": (["--max-model-len", "0"], "max_model_len must be"),
    "no answer": (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
    "an answer as long as the model": (["--max-new-tokens", "8190"], "more than the model's 8192"),
    "a window in a model without one": (["--arch", "mla", "--corrupt", "window"], "no such piece"),
    "a state in a model without one": (["--corrupt", "state"], "no such piece"),
    "an unknown tier": (["--tier", "disk:/x:1GiB"], "unknown kind of tier"),
    "a tier without a size": (["--tier", "file:/tmp"], "file:PATH:SIZE"),
    "a tier with a bad size": (["--tier", "file:/tmp:1iB"], "got '1iB'"),
    "a tier of one block": (["--tier", "file:/tmp:1MiB"], "give the tier at least"),
    "a tier below nothing": (["--tier", "file:/tmp:1GiB", "--offload", "off"], "below host memory"),
    "results nowhere": (["--json", "/no/such/folder/x.json"], "not a file that can be written"),
    "results in a folder": (["--json", "/tmp"], "not a file that can be written"),
    "results below a file": (["--json", f"{__file__}/x.json"], "not a file that can be written"),
    "results where only the kernel writes": (["--json", "/proc/x.json"], "not a file that can be written"),
    "results with a name too long": (["--json", 300 * "x"], "not a file that can be written"),
    "no such prompts": (["--prompts", "/no/such/file.jsonl"], "cannot read the prompts"),
    "prompts in a folder": (["--prompts", "/tmp"], "cannot read the prompts in /tmp: Is a directory"),
    "no such model": (["--model", "/no/such/model"], "cannot load the model '/no/such/model'"),
    "a model without a name": (["--model", ""], "cannot load the model ''"),
}


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("case", OPTIONS)
def test_an_option_that_cannot_be_carried_out(refuse, case):
    options, sentence = OPTIONS[case]
    assert sentence in refuse(*options)


@pytest.mark.parametrize(
    "options", [["--arch", "moe"], ["--arch", "mla", "--model", "x"], ["--rounds", "two"], ["--rounds", "1e9"], ["x"]]
)
def test_an_option_that_the_help_excludes(capsys, options):
    with pytest.raises(SystemExit) as exit:
        offline_generation.main(options)
    assert exit.value.code == 2
    assert ": error: " in capsys.readouterr().err.splitlines()[-1]


GOOD = b'{"prompt": "good"}'
LINES = {
    "not JSON": (b"not json", "'not json'"),
    "brackets deeper than Python's stack": (100_000 * b"[", 60 * "["),
    "an integer longer than Python's longest": (b'{"prompt": ' + 5_000 * b"1" + b"}", "1111"),
    "no object": (b"[]", "'[]'"),
    "no prompt": (b'{"text": "a"}', '{"text": "a"}'),
    "a number": (b'{"prompt": 1}', "not a text"),
    "half of a letter": (rb'{"prompt": "\ud800"}', "not a text"),
    "not UTF-8": (b'{"prompt": "\xff"}', "in UTF-8"),
    "control characters": (b'{"prompt": \x1b[2J}', r"\x1b[2J"),
    "an empty prompt": (b'{"prompt": ""}', "at least one token"),
    "longer than the model": (b'{"prompt": "%s"}' % (9_000 * b"x"), "more than the model's 8192"),
    "longer than the device pool": (b'{"prompt": "%s"}' % (2_000 * b"x"), "take 126 device blocks, but the pool has 9"),
}


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("case", LINES)
def test_a_bad_line_of_prompts_is_named_and_costs_no_answer(refuse, tmp_path, case):
    line, sentence = LINES[case]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(GOOD + b"\n\n" + line + b"\n" + GOOD + b"\n")
    message = refuse("--prompts", prompts, "--device-blocks", "9")
    assert f"{prompts}, line 3" in message
    assert sentence in message


@pytest.mark.parametrize("arch", ["full", "swa", "hybrid"])
def test_the_check_before_a_run_refuses_the_same_prompts_as_the_generator(arch):
    model = build_model(arch, hidden=32, layers=4)
    generator = PrefixCachedGenerator(model, device_blocks=30, prefix_caching=False)

    def is_refused(length):
        try:
            check_prompt(Prompt("here", [1] * length), generator, 2)
        except ConfigurationError:
            return True
        return False

    longest = max(length for length in range(1, 600) if not is_refused(length))
    generator.answer([1] * longest, 2)
    with pytest.raises(PromptRefused, match="but the pool has 30"):
        generator.answer([1] * (longest + 1), 2)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_prompts(refuse, tmp_path, text):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(text)
    assert f"there are no prompts in {prompts}" in refuse("--prompts", prompts)


def test_results_do_not_overwrite_prompts(refuse, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(GOOD)
    assert "would overwrite the prompts" in refuse("--prompts", prompts, "--json", tmp_path / "." / "prompts.jsonl")
    assert prompts.read_bytes() == GOOD


def test_a_refused_run_leaves_the_results_of_the_last_one(refuse, tmp_path):
    results = tmp_path / "results.json"
    results.write_text("from before")
    refuse("--json", results, "--rounds", "1", "--device-blocks", "3")
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
    assert results.read_text() == "from before"


def truncated_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1_000])


def configured(**values):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def containing(name, text):
    return lambda folder: (folder / name).write_text(text)


def foreign_tokenizer(folder):
    tokenizer = Tokenizer(WordLevel({"<unk>": 1_000}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


CHECKPOINTS = {
    "truncated weights": (truncated_weights, "cannot load the model"),
    "weights of another size": (configured(vocab_size=300), "cannot load the model"),
    "a configuration that is not JSON": (containing("config.json", "{"), "cannot load the model"),
    "a configuration that is a list": (containing("config.json", "[]"), "cannot load the model"),
    "an unknown family": (configured(model_type="no such"), "cannot load the model"),
    "a family that answers nothing": (configured(model_type="t5"), "cannot load the model"),
    "a text for a number": (configured(hidden_size="x"), "cannot load the model"),
    "no tokenizer": (lambda folder: None, "with --byte-tokens none is needed"),
    "a tokenizer that is not JSON": (containing("tokenizer.json", "{broken"), "cannot load the tokenizer"),
    "a tokenizer that is a list": (containing("tokenizer.json", "[]"), "cannot load the tokenizer"),
    "a tokenizer of another model": (foreign_tokenizer, "the tokenizer gives token 1000, and the model has 320"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_damaged_checkpoint(refuse, tmp_path, checkpoint, case):
    damage, sentence = CHECKPOINTS[case]
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    damage(folder)
    message = refuse("--model", folder, "--documents", "1")
    assert sentence in message
    assert str(folder) in message or "question 1" in message


def test_a_vocabulary_too_small_for_bytes(refuse, tmp_path):
    config = BloomConfig(vocab_size=100, hidden_size=16, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    assert "100 tokens, too few for bytes" in refuse("--model", tmp_path, "--byte-tokens")


@pytest.mark.parametrize(
    "model",
    [
        lambda: BloomForCausalLM(BloomConfig(vocab_size=300, hidden_size=16, n_layer=1, n_head=2)),
        lambda: MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1)),
    ],
    ids=["bloom", "mamba"],
)
def test_a_model_without_a_longest_prompt_is_refused(refuse, tmp_path, model):
    model().save_pretrained(tmp_path)  # with --max-model-len it runs: see test_offline_generation.py
    assert "how long a prompt may be" in refuse("--model", tmp_path, "--byte-tokens")
