# make train          create a virtual environment, install the dependencies, run the quickstart on two processes
# make test           the tests that need no cluster, within minutes
# make test-long      the long ones: layouts, the fault matrix, compiled blocks, the commands of the README
# make test-nightly   the rest of the long sweeps: every layout and every command of the documentation
# make test-cluster   the tests on a real Slurm, which they bring up themselves (root, Debian)
# make test-disk      NVMe offload; compiles its reader for minutes (libaio)
# make lint           ruff and mypy
# make docs           the documentation site, in build/site
# make bench          a training step beside plain PyTorch
#
# With a GPU (nvidia-smi works) the default build of torch is installed, without one a CPU build where pip finds one. For
# another build, such as another CUDA version, pass PyTorch's index of its wheels (its "Get started" page has the address):
# make train TORCH_INDEX=https://...

PYTHON ?= python3
VENV ?= .venv
PROCESSES ?= 2
# Test files that run side by side: many wait for processes and timeouts, so three keep two cores busy.
JOBS ?= 3
# Each nightly run draws random layouts of its own, and a failure names the seed.
LAYOUT_SEED ?= $(shell date +%s)
BIN := $(VENV)/bin
# Hundreds of tests start a process: it should not compile the sources anew where the environment forbids to keep them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-long test-nightly test-cluster test-disk lint docs bench clean

train: $(VENV)/.base
	@echo "Training configs/run/quickstart.yaml on $(PROCESSES) processes: three to four minutes on two cores."
	$(BIN)/xscale launch local --processes $(PROCESSES) configs/run/quickstart.yaml \
		parallel.mesh.ep=$(PROCESSES) $(ARGS)
	@echo "For runs of your own: source $(BIN)/activate; xscale list recipes; xscale init; xscale --help"

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not long and not slurm and not gpu and not disk" $(ARGS)

test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "long and not nightly and not slurm and not gpu and not disk" $(ARGS)

test-nightly: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "nightly and not slurm and not gpu and not disk" \
		--layout-seed $(LAYOUT_SEED) $(ARGS)

test-cluster: $(VENV)/.dev
	$(BIN)/python -m pytest -m slurm tests/slurm $(ARGS)

test-disk: $(VENV)/.dev
	$(BIN)/python -m pytest -m disk tests/parallel $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy xscale launch/xscale_launch kernels/xscale_kernels plugins/xscale_tinybert

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

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
