# make demo | make test: see README.md. PYTHON creates the environment in which everything runs.
PYTHON ?= python3
VENV ?= .venv
ALGO ?= grpo
SEED ?= 0
FAULTS ?= 200
STALENESS ?= 0
ASYNC ?= 0
GPU_WHEELS ?= .gpu-wheels
GPU_LOCKS := tests/nightly/gpu_wheels/newest.txt tests/nightly/gpu_wheels/cuda12.txt
BIN := $(VENV)/bin
# Tests in processes, whole files at a time, the slow ones first. One more than two cores have, since
# tests also wait: for time limits, servers and engines.
TEST_WORKERS ?= 3
SPREAD = -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
# More random examples of each property than `make test` tries.
THOROUGH = --hypothesis-profile thorough
export PYTHONPATH := $(CURDIR)
# The tests start hundreds of processes, which would all compile our code again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench licences campaign coverage demo demo-hard demo-zh docs install lock lock-gpu slow test test-all test-engines test-fast test-nightly test-gpu-wheels chromium slurm lint format clean
.DEFAULT_GOAL := demo

$(VENV)/.installed: pyproject.toml requirements.lock $(GPU_LOCKS) scripts/install.py
	$(PYTHON) scripts/install.py $(VENV) $(INSTALL_ARGS)

# Only `make test-all` needs Lucene (pyserini and a Java runtime).
$(VENV)/.installed-lucene: pyproject.toml scripts/install.py
	$(PYTHON) scripts/install.py $(VENV) $(INSTALL_ARGS) --with lucene

$(VENV)/.installed-docs: pyproject.toml scripts/install.py
	$(PYTHON) scripts/install.py $(VENV) $(INSTALL_ARGS) --with docs

install: $(VENV)/.installed

# The documentation site, from README and docs/, in build/site; needs no network.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m mkdocs build

lock: $(VENV)/.installed
	$(BIN)/pip install -q uv
	$(BIN)/python -m scripts.lock

# Resolves the versions of the GPU builds again; downloads no wheel. `make test-gpu-wheels` follows.
lock-gpu: $(VENV)/.installed
	$(BIN)/pip install -q uv
	$(BIN)/python -m scripts.lock --gpu

licences: $(VENV)/.installed
	$(BIN)/python -m scripts.licences

# Under another name, since `make -n` runs what names $(MAKE), and this would train.
AGAIN = $(MAKE)

demo:
	@start=$$(date +%s); $(AGAIN) --no-print-directory $(VENV)/.installed && \
	exec $(BIN)/python -m scripts.demo --algorithm $(ALGO) --seed $(SEED) --staleness $(ASYNC) \
	--started-at $$start $(DEMO_ARGS)

# The same in Chinese: corpus, questions, prompt and feedback.
demo-zh: DEMO_ARGS += --world zh --out runs/demo-zh
demo-zh: demo

# Seven kinds of questions: up to three searches, none, none that helps, documents that differ.
demo-hard: DEMO_ARGS += --world hard --out runs/demo-hard
demo-hard: demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(SPREAD)

# For development: without the tests in tests/slow.txt, which `make slow` updates, and of vLLM.
test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest --fast $(SPREAD)

slow test-fast test-nightly: TEST_WORKERS = 2
slow: $(VENV)/.installed
	$(BIN)/python -m pytest --record-slow $(SPREAD)

# The whole CPU suite with line coverage of verl/ and search_r1/ in all processes.
coverage: $(VENV)/.installed
	$(BIN)/python -m pytest $(SPREAD) --cov --cov-report=term-missing:skip-covered

# Real runs with injected faults; full disks and lost permissions need root.
campaign: $(VENV)/.installed
	$(BIN)/python -m tests.nightly.proofs.campaign --faults $(FAULTS) --seed $(SEED) --staleness $(STALENESS)

# Proofs, pages in a browser, simulated GPUs, and the commands and programs of the documentation.
test-nightly: chromium $(VENV)/.installed-docs
	$(BIN)/python -m pytest tests/nightly -m "not gpu and not gpu_wheels" $(SPREAD) $(THOROUGH)

test-all: chromium slurm $(VENV)/.installed-lucene $(VENV)/.installed-docs
	$(BIN)/python -m pytest -o norecursedirs=".*" -m "not gpu and not gpu_wheels" $(THOROUGH)

# Tests against the oldest and newest allowed GPU wheels of vLLM and those of CUDA 12 (30 GB, a
# quarter of an hour), without a GPU.
test-gpu-wheels: $(VENV)/.installed $(foreach end,oldest newest cuda12,$(GPU_WHEELS)/$(end)/.installed)
	GPU_WHEELS=$(GPU_WHEELS) $(BIN)/python -m pytest -m gpu_wheels tests/nightly/gpu_wheels

# Installed again when its versions change.
$(GPU_WHEELS)/%/.installed: tests/nightly/gpu_wheels/%.txt
	rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -c $< vllm transformers ray peft omegaconf hydra-core
	touch $@

# A real Milvus server from its wheel: filled, compared, killed, trained with (three minutes).
# CORPUS_PATH=passages.jsonl adds passages of your own.
test-engines: $(VENV)/.installed
	$(BIN)/pip install -q milvus==2.3.5
	$(BIN)/python -m pytest tests/nightly/engines -s

chromium:
	@command -v chromium >/dev/null || { echo "make test-nightly opens pages in Chromium," \
	"which is missing: apt-get install chromium fonts-wqy-zenhei" >&2; exit 1; }

slurm:
	@PATH=$$PATH:/usr/sbin; for program in munged slurmctld slurmd sbatch; do \
	command -v $$program >/dev/null || { echo "make test-all runs Slurm jobs; $$program is" \
	"missing: apt-get install munge slurmctld slurmd slurm-client" >&2; exit 1; }; done

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.retrieval $(BENCH_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Removes only what can be built again, never the checkpoints of runs.
clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
