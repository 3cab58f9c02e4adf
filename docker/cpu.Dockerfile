# xscale on CPU with everything that the tests need; the default command is `make test`.
#
#   docker build -f docker/cpu.Dockerfile --build-arg TORCH_INDEX=<PyTorch's index of CPU wheels> -t xscale:cpu .
#   docker run --rm xscale:cpu                    (make test)
#   docker run --rm --privileged xscale:cpu make test-cluster
FROM python:3.11-slim-bookworm

# g++ compiles the code that torch.compile generates; the launcher's tests need Open MPI and Slurm.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        g++ git make munge openmpi-bin procps slurm-client slurmctld slurmd \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /xscale
ARG TORCH_INDEX=""
ENV TORCH_INDEX=${TORCH_INDEX} PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# Dependencies first: they change less often than the code, so their layer stays in the cache.
COPY pyproject.toml constraints.txt install.sh Makefile README.md LICENSE ./
COPY xscale/__init__.py xscale/__init__.py
RUN make .venv/.dev
COPY . .
RUN make .venv/.dev && .venv/bin/python docker/check_imports.py base deepspeed megatron mpi hf bleu parquet hub eval dev

CMD ["make", "test"]
