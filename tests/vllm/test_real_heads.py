"""An engine of four ranks for a model of two KV heads: two of its processes have the same head, and keep it once."""

import subprocess

import pytest

from tests.vllm.models import save_llama
from tests.vllm.test_plugin import STARTED, python_in

ENGINE = f"""{STARTED}
from dataclasses import replace
from connector.vllm.shares import Share
from cpu_prefix_cache.deciding import Direction

def main():
    llm = started(ranks=4, max_logprobs=-1)
    once = SamplingParams(temperature=0, max_tokens=1, detokenize=False, logprobs=-1)
    for _ in range(20):  # nothing is stored before all ranks have reported their host memory as ready
        (answer,) = llm.generate([dict(prompt_token_ids=list(range(300)))], once, use_tqdm=False)
        seen = sorted((token, each.logprob) for token, each in answer.outputs[0].logprobs[0].items())
        if answer.num_cached_tokens:
            break
        first = seen
        llm.reset_prefix_cache()
    worst = max(abs(one - other) for (_, one), (_, other) in zip(first, seen, strict=True))
    print("cached tokens:", answer.num_cached_tokens, "difference:", worst)
"""
AS_IT_IS = """
if __name__ == "__main__":
    main()
"""
THE_OTHER_HEAD = """
right = Share.of_transfer

def of_transfer(share, transfer):
    is_load = transfer.direction is Direction.LOAD
    return right(replace(share, rank=share.rank ^ 2) if is_load else share, transfer)

Share.of_transfer = of_transfer
"""


def ran(folder, program: str) -> tuple[int, float]:
    """The tokens of the prompt that were found, and the largest difference that it made in a logprob."""
    (folder / "model").mkdir()
    save_llama(folder / "model")  # two KV heads
    (folder / "engine.py").write_text(program)
    done: subprocess.CompletedProcess[str] = python_in(folder, "engine.py")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("cached"))
    return int(line.split()[2]), float(line.split()[-1])


@pytest.mark.slow
def test_each_of_four_processes_has_its_head_again(tmp_path):
    cached, difference = ran(tmp_path, ENGINE + AS_IT_IS)
    assert cached == 288 and difference < 1e-4


@pytest.mark.slow
def test_control_the_other_head_makes_another_answer(tmp_path):
    cached, difference = ran(tmp_path, ENGINE + THE_OTHER_HEAD + AS_IT_IS)
    assert cached == 288 and difference > 1e-2
