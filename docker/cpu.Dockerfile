# xscale on a CPU with everything that the tests need; running it runs `make test`.
#
#   docker build -f docker/cpu.Dockerfile --build-arg TORCH_INDEX=<PyTorch's index of CPU wheels> -t xscale:cpu .
#   docker run --rm xscale:cpu                    (make test)
#   docker run --rm --privileged xscale:cpu make test-cluster
FROM python:3.11-slim-bookworm

# g++ compiles what torch.compile writes; Open MPI and Slurm are what the launcher's tests start.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        g++ git make munge openmpi-bin procps slurm-client slurmctld slurmd \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /xscale
ARG TORCH_INDEX=""
ENV TORCH_INDEX=${TORCH_INDEX} PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# The dependencies first: they change less often than the code, and their layer is kept.
COPY pyproject.toml constraints.txt install.sh Makefile README.md LICENSE ./
COPY xscale/__init__.py xscale/__init__.py
RUN make .venv/.dev
COPY . .
RUN make .venv/.dev && .venv/bin/python docker/check_imports.py base deepspeed megatron mpi hf dev

CMD ["make", "test"]
