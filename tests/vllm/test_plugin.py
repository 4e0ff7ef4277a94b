"""The connector by its name alone, as a server is started: each of vLLM's processes finds it through the entry point.

Each test starts a Python of its own in an empty folder, whose path has the package that is tested and nothing else of
the repository.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import connector
from tests.vllm.models import save_llama

SOURCES = Path(connector.__file__).parents[1]  # an editable installation may be of another copy of the repository
STARTED = """
from vllm import LLM, SamplingParams

def started(ranks, **more):
    extra = dict(cpu_bytes_to_use=2**25, offload="eager", reset="with_connector")
    transfer = dict(kv_connector="CPUPrefixCacheConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    options = dict(skip_tokenizer_init=True, dtype="float32", enforce_eager=True, use_tqdm_on_load=False)
    sizes = dict(block_size=32, num_gpu_blocks_override=20, max_model_len=512, kv_cache_memory_bytes=2**28)
    return LLM(model="model", tensor_parallel_size=ranks, kv_transfer_config=transfer, **options, **sizes, **more)
"""
ENGINE = f"""{STARTED}
def main():
    llm = started(ranks=2)
    once = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    for _ in range(20):  # nothing is stored before all ranks have reported their host memory as ready
        (answer,) = llm.generate([dict(prompt_token_ids=list(range(300)))], once, use_tqdm=False)
        print("cached tokens:", answer.num_cached_tokens)
        if answer.num_cached_tokens:
            break
        llm.reset_prefix_cache()

if __name__ == "__main__":
    main()
"""


def python_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPATH"] = str(SOURCES)
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # or each worker wants a NUMA node
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def engine_in(folder: Path) -> subprocess.CompletedProcess[str]:
    """An engine whose scheduler and two workers have processes of their own. The device forgets after each answer."""
    (folder / "model").mkdir()
    save_llama(folder / "model")
    (folder / "engine.py").write_text(ENGINE)
    return python_in(folder, "engine.py")


@pytest.mark.slow
def test_all_processes_of_an_engine_find_the_connector_by_its_name(tmp_path):
    ran = engine_in(tmp_path)
    assert ran.returncode == 0, ran.stderr
    cached = [line for line in ran.stdout.splitlines() if line.startswith("cached")]
    assert cached[0] == "cached tokens: 0"
    assert cached[-1] == "cached tokens: 288"  # from the host


def test_a_foreign_module_of_its_package_s_name_in_the_way_is_named(tmp_path):
    (tmp_path / "connector.py").touch()
    ran = engine_in(tmp_path)
    assert ran.returncode != 0
    assert f"{tmp_path / 'connector.py'} hides the package of the same name" in ran.stderr


def test_an_engine_without_the_connector_does_not_import_it(tmp_path):
    (tmp_path / "connector.py").write_text("raise SystemExit('imported')\n")
    code = "from vllm.plugins import load_general_plugins; load_general_plugins()"
    ran = python_in(tmp_path, "-c", code)
    assert ran.returncode == 0, ran.stderr
    assert "connector" not in ran.stderr
