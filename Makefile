# Everything runs from .venv, made on first use; `make demo` and `make test` need nothing before them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Both ends of the supported range (src/tutti/versions.py) and two between them.
TORCH_VERSIONS ?= 2.9.1 2.11.0 2.13.0 2.15.0

# Real datasets, where they lie beside the checkout.
ifneq ($(wildcard ../shared/data),)
export TUTTI_DATA ?= $(abspath ../shared/data)
endif

.PHONY: help install demo test test-quick test-matrix test-frameworks test-slurm check docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train a small model with 2 workers and check it against one (under a minute)"
	@echo "make test   the whole test suite"
	@echo "make test-quick   the inner loop of it"
	@echo "make test-matrix   the quick tests on several versions of torch"
	@echo "make test-frameworks   tests under Lightning, Transformers, Accelerate and Ray Train, which it installs"
	@echo "make test-slurm   tests on a Slurm cluster of this host, which it installs (Debian, Ubuntu; as root)"
	@echo "make check  ruff and mypy"
	@echo "make docs   the documentation site, into site/"
	@echo "make bench  training steps and all-reduce against DDP, Gloo and Open MPI"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,docs,mpi,report]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/tutti train digits --workers 2 --check

# Three processes share two cores: with two, a fifth of the cores' time was idle, while tests waited for time limits and
# for each other. Tests of killed workers come after these; of those with labs (xdist_group) one runs at a time.
test: $(STAMP)
	$(BIN)/pytest --ignore=tests/integration --ignore=tests/frameworks -n 3 --dist worksteal
	$(BIN)/pytest tests/integration -n 3 --dist loadgroup

# Tests of Tutti inside other frameworks, which are installed for them.
test-frameworks: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[lightning,transformers,ray]'
	$(BIN)/pytest tests/frameworks

# Slurm's daemons are started by the tests themselves, in a folder of theirs. Without them, the tests are skipped.
test-slurm: $(STAMP)
	apt-get install --yes --no-install-recommends slurm-wlm munge
	TUTTI_TEST_SLURM=1 $(BIN)/pytest tests/integration/test_slurm.py
	TUTTI_TEST_SLURM=1 $(BIN)/pytest tests/contract/test_launcher_contract.py -k slurm

# For the inner loop: one process, no launches.
test-quick: $(STAMP)
	$(BIN)/pytest tests/unit tests/contract/test_packets.py tests/contract/test_transports.py -n 2 --dist worksteal

# PYTHON=python3.13 chooses another Python.
test-matrix:
	.ci/matrix $(PYTHON) $(TORCH_VERSIONS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)
	$(BIN)/tutti bench step
	$(BIN)/tutti bench allreduce

clean:
	rm -rf $(VENV) .matrix build dist runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
