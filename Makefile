# Every target does its own set-up and is safe to repeat.

PYTHON ?= python3
PINNED := $(shell grep -i '^torch==' constraints.txt)
TORCH  ?= $(PINNED)
VENV   := .venv
BIN    := $(VENV)/bin

# An NVIDIA driver brings the matching CuPy; its major version decides which.
CUDA   ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p')
EXTRAS := $(if $(CUDA),[$(if $(filter 12,$(CUDA)),cuda,cuda13)],)

# The service: its own Python environment on the system's Python, never on a checkout's.
PREFIX        ?= /opt/kvpair
SYSTEM_PYTHON ?= /usr/bin/python3
BINDIR        ?= /usr/local/bin
# Where systemd looks for units, users and folders that no package brought.
UNITLIB       ?= /usr/local/lib
SYSCONFDIR    ?= /etc
PLACES = $(foreach name,DESTDIR PREFIX BINDIR UNITLIB SYSCONFDIR,$(name)='$($(name))')

.DEFAULT_GOAL := help
.PHONY: FORCE help install dev demo test check lint fmt types layers unit bench clean \
	test-gpu bench-gpu show-gpu sanitize-gpu test-systemd install-prefix install-system uninstall-system

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort -t: -k1,1 | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

# Constraints pin everything but torch: `TORCH=` may ask for another, and then Triton, which goes
# with torch's release, is not pinned either.
UNPINNED := ^torch==$(if $(filter-out $(PINNED),$(TORCH)),\|^triton==)
$(VENV)/constraints.txt: FORCE
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@grep -vi '$(UNPINNED)' constraints.txt > $@.part && echo '$(TORCH)' >> $@.part
	@if cmp -s $@.part $@; then rm $@.part; else mv $@.part $@; fi

$(VENV)/.installed: pyproject.toml $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --upgrade $$(grep '^pip==' constraints.txt)
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.$(EXTRAS)'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --group dev
	touch $@

install: $(VENV)/.installed ## Install kvpair into .venv (with CuPy where a driver is seen)

dev: $(VENV)/.installed-dev ## Install the development tools as well

# In a folder of its own, so that a pair that runs already is left alone.
demo: install ## Start both daemons, ask one question, show their status, stop them
	$(BIN)/kvpair model fetch smollm2-135m-instruct
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	KVPAIR_SOCKET="$$folder/prefilld.sock" $(BIN)/kvpair up --log-level warning -- sh -ec ' \
		echo "> What is the capital of France?"; \
		$(BIN)/kvpair generate "What is the capital of France?"; \
		$(BIN)/kvpair status'

lint: dev ## Form: ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: dev ## Put the form right
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

types: dev ## Types: mypy --strict
	$(BIN)/mypy

layers: dev ## Floors of the house: import-linter
	$(BIN)/lint-imports

# Daemons that only compute; what stops them, kills them or waits for a deadline has the machine alone.
BESIDE_OTHERS := $(patsubst %,tests/integration/test_%.py,client_border deaths_under_load exactness \
	handovers pair_basics pair_everyday pair_exactness pair_models pair_preemption pair_prefix_cache \
	pair_sampling pair_soak pool_ends)

# A worker a core, and a file at a time; torch's own threads would only wait for one another.
UNIT := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --dist loadfile

unit: dev ## Unit and property tests, the ones without daemons
	$(UNIT) tests/unit tests/property

check: lint types layers unit ## The quick part of `test`

test: lint types layers ## Everything that needs no GPU; what CI runs
	$(UNIT) -m "not gpu" tests/unit tests/property tests/benchmarks
	$(UNIT) -m "not gpu" $(BESIDE_OTHERS)
	$(BIN)/pytest -q -m "not gpu" $(addprefix --ignore=,$(BESIDE_OTHERS)) \
		tests/integration tests/kubernetes tests/systemd

test-systemd: dev ## The service under a real systemd, the pod in namespaces; needs root
	$(BIN)/pytest -q -m systemd tests/systemd tests/kubernetes

bench: dev ## Measure on this machine; CPU figures are ratios within one run
	$(BIN)/python -m tests.benchmarks

# An environment that is staged in DESTDIR runs in PREFIX: its programs name their Python by path.
install-prefix: ## Install only the programs, under PREFIX=/opt/kvpair
	$(SYSTEM_PYTHON) -m venv '$(DESTDIR)$(PREFIX)'
	grep -vi '$(UNPINNED)' constraints.txt > '$(DESTDIR)$(PREFIX)/constraints.txt'
	echo '$(TORCH)' >> '$(DESTDIR)$(PREFIX)/constraints.txt'
	'$(DESTDIR)$(PREFIX)/bin/python' -m pip install --quiet --disable-pip-version-check \
		--root-user-action=ignore --constraint '$(DESTDIR)$(PREFIX)/constraints.txt' \
		'$(TORCH)' '.$(EXTRAS)'
	sed -i "1s|^#!.*/bin/python[^ ]*|#!$(PREFIX)/bin/python3|" \
		$(foreach program,kvpair prefilld decoded,'$(DESTDIR)$(PREFIX)/bin/$(program)')

install-system: install-prefix ## Install the service: programs, units, user and folders (as root)
	$(PLACES) systemd/install.sh install

uninstall-system: ## Remove the service; configuration, cache and user stay
	$(PLACES) systemd/install.sh uninstall

test-gpu: dev ## Every test that needs one GPU or two
	$(BIN)/pytest -q -m gpu tests/gpu

# Where figures gather; the README's are in tests/benchmarks/results/h200x2.json.
RESULTS ?= $(VENV)/bench-gpu.json
GATHER   = --json '$(RESULTS)' --commit "$$(git rev-parse --short HEAD || echo unknown)"

bench-gpu: dev ## Measure on one GPU or two: kernels, engines, the pair; RESULTS=FILE keeps the figures
	$(BIN)/python -m tests.benchmarks.gpu_ops
	$(BIN)/python -m tests.benchmarks.gpu_forward
	$(BIN)/python -m tests.benchmarks.gpu_prefill
	$(BIN)/python -m tests.benchmarks.gpu_engine
	$(BIN)/python -m tests.benchmarks.gpu_pull $(GATHER)
	$(BIN)/python -m tests.benchmarks.gpu_pair $(GATHER)
	$(BIN)/python -m tests.benchmarks.kv_waste $(GATHER)
	$(BIN)/python -m tests.benchmarks.gpu_table '$(RESULTS)'

show-gpu: dev ## What else a pair on GPUs must show: ten thousand hand-overs, deaths, broken links
	$(BIN)/python -m tests.benchmarks.gpu_shown

sanitize-gpu: dev ## The kernels under compute-sanitizer, where the machine has it
	$(BIN)/python -m tests.benchmarks.gpu_sanitize

clean: ## Remove what was built here
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
