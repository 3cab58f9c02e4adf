"""Check an image during its build: import its packages and compare their versions with the pins. Fails the build.

python docker/check_imports.py base [deepspeed] [megatron] [mpi] [hf] [bleu] [parquet] [hub] [eval] [fla] [liger]
    [torchao] [wandb] [mlflow] [dev] [cuda]
"""

import importlib
import importlib.metadata
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = {
    "base": ["torch", "numpy", "pydantic", "yaml", "typer", "rich", "sentencepiece", "safetensors", "tensorboard",
             "matplotlib", "PIL", "zstandard", "xxhash", "xscale", "xscale.cli.main", "xscale_kernels",
             "xscale_launch.main", "xscale_tinybert.augment_data"],
    "deepspeed": ["deepspeed"],
    "megatron": ["megatron.core"],
    "mpi": ["mpi4py.MPI"],
    "hf": ["transformers"],
    "bleu": ["sacrebleu"],
    "parquet": ["pyarrow"],
    "hub": ["datasets"],
    "eval": ["lm_eval"],
    "fla": ["fla"],
    "liger": ["liger_kernel"],
    "torchao": ["torchao.optim", "torchao.float8"],
    "wandb": ["wandb"],
    "mlflow": ["mlflow"],
    "dev": ["hatchling", "pytest", "xdist", "hypothesis", "ruff", "mypy", "pre_commit", "psutil", "triton", "mkdocs",
            "material", "fla", "liger_kernel", "sklearn", "accelerate", "schedulefree", "torchao"],
    "cuda": ["apex", "amp_C", "fused_layer_norm_cuda", "triton"],
}  # fmt: skip


def pins() -> dict[str, str]:
    """Return package name (normalised) -> version, from constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = dict(line.split("==") for line in lines if re.match(r"[\w.-]+==", line))
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version.strip() for name, version in found.items()
    }


def problems(groups: list[str]) -> list[str]:
    """Find modules that cannot be imported, and packages whose version is not the pinned one."""
    found = []
    for module in (module for group in groups for module in MODULES[group]):
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken build can raise anything; report which module it was
            found.append(f"{module}: {type(error).__name__}: {error}")
    for name, version in pins().items():
        try:
            installed = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
        if installed != version.partition("+")[0]:
            found.append(f"{name} is {installed}, but {version} is pinned")
    return found


def main(groups: list[str]) -> int:
    """Print the problems; exit status 0 if there are none."""
    unknown = set(groups) - set(MODULES)
    if unknown or not groups:
        print(f"give one or more of {', '.join(MODULES)}", file=sys.stderr)
        return 2
    found = problems(groups)
    print(
        "\n".join(found)
        if found
        else f"all imports of {', '.join(groups)} work, with the pinned versions"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
