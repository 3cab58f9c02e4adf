# xscale on NVIDIA GPUs with the whole pinned stack: torch, DeepSpeed, megatron-core, apex from source, mpi4py on Open MPI.
#
#   docker build -f docker/cuda.Dockerfile -t xscale:cuda .
#   docker run --rm --gpus all --ipc=host xscale:cuda xscale doctor
#
# For Apptainer: apptainer build xscale.sif docker-daemon://xscale:cuda
#
# torch 2.13's wheels are built with CUDA 13.0; apex is compiled against them with nvcc of the same version.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        g++ git libopenmpi-dev make ninja-build openmpi-bin openssh-client python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /xscale
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 PATH=/xscale/.venv/bin:${PATH}

# One pinned torch: every later step uses the same constraints, so none can install another version.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY xscale/__init__.py xscale/__init__.py
RUN python3 -m venv .venv \
    && pip install "torch==$(sed -n 's/^torch==//p' constraints.txt)" \
    && DS_BUILD_OPS=0 pip install -c constraints.txt -e ".[deepspeed,megatron,mpi,hf,bleu,parquet,hub,eval,fla,liger,torchao,wandb,dev]"

# apex is not on a package index. The commit was reviewed; the architectures are those of H100/H200 and B200.
ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
ARG CUDA_ARCHITECTURES="9.0;10.0"
ARG BUILD_JOBS=8
RUN git init -q /tmp/apex \
    && cd /tmp/apex \
    && git fetch -q --depth 1 https://github.com/NVIDIA/apex "${APEX_COMMIT}" \
    && git checkout -q FETCH_HEAD \
    && pip install "setuptools>=77" wheel \
    && TORCH_CUDA_ARCH_LIST="${CUDA_ARCHITECTURES}" MAX_JOBS="${BUILD_JOBS}" APEX_CPP_EXT=1 APEX_CUDA_EXT=1 \
        pip install -c /xscale/constraints.txt --no-build-isolation . \
    && cd / && rm -rf /tmp/apex

COPY . .
RUN pip install --no-deps -e . && python docker/check_imports.py base deepspeed megatron mpi hf bleu parquet hub eval fla liger torchao wandb dev cuda

CMD ["xscale", "--help"]
