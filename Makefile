# make train    a virtual environment, the dependencies, then the quickstart on two processes
# make test     everything that is tested without a cluster
# make test-cluster    those on a real Slurm, which they bring up themselves (root, Debian)
# make test-disk       offload to a disk; compiles what reads it for minutes (libaio)
# make lint     ruff and mypy
# make bench    a training step beside plain PyTorch
#
# Without a GPU a CPU build of torch is installed where pip can find one. If yours cannot, name PyTorch's index of CPU
# wheels (its "Get started" page has it): make train TORCH_INDEX=https://...

PYTHON ?= python3
VENV ?= .venv
PROCESSES ?= 2
# Files of tests side by side: on two cores two take two thirds of the time of one.
JOBS ?= 2
BIN := $(VENV)/bin

.PHONY: train test test-cluster test-disk lint bench clean

train: $(VENV)/.base
	$(BIN)/xscale launch local --processes $(PROCESSES) configs/run/quickstart.yaml \
		parallel.mesh.ep=$(PROCESSES) $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slurm and not gpu and not disk" $(ARGS)

test-cluster: $(VENV)/.dev
	$(BIN)/python -m pytest -m slurm tests/slurm $(ARGS)

test-disk: $(VENV)/.dev
	$(BIN)/python -m pytest -m disk tests/parallel $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy xscale launch/xscale_launch kernels/xscale_kernels

bench: $(VENV)/.base
	$(BIN)/xscale bench train configs/run/quickstart.yaml $(ARGS)

$(VENV)/.base: pyproject.toml constraints.txt install.sh
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh install.sh "$(VENV)"
	touch $@

$(VENV)/.dev: $(VENV)/.base
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh install.sh "$(VENV)" dev
	touch $@

clean:
	rm -rf $(VENV) build dist
