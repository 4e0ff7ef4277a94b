"""The README's program for Hugging Face models runs as it is printed, and its second prompt is found."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from builtin_models import build_model

ROOT = Path(__file__).parents[3]


def test_its_program_finds_the_second_prompt(tmp_path):
    text = (ROOT / "README.md").read_text()
    [program] = [each for each in re.findall(r"(?s)```python\n(.*?)```", text) if "transformers" in each]
    build_model("full", hidden=64, layers=2).save_pretrained(tmp_path)
    words = {word: at for at, word in enumerate(["<unk>", *sorted(set(text.split()))[:300]])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    printed = subprocess.run(
        [sys.executable, "-c", program, tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    (first, _), (second, tokens) = re.findall(r"(\d+) of (\d+) tokens found, [\d.]+ s", printed)
    assert int(first) == 0 and int(second) > 0.9 * int(tokens)
