"""The recipes that jobs train: data from xscale's own sources, so that nothing is fetched, and toy sizes for a CPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xscale.bench.gpu.case import GpuContext
from xscale.bench.harness.machine import ROOT
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError
from xscale.recipe import Recipe, read

FINE = tuple(
    f"model.stack.block.ffn.{key}" for key in ("experts=64", "router.top_k=8", "expert.hidden=1408")
)
"""Overrides: 64 experts of a quarter of the hidden width, 8 a token, so as many active parameters."""
TOY = {"width": 64, "depth": 2, "heads": 4, "kv_heads": 2, "hidden": 96, "experts": 8}
"""Largest sizes of a toy run."""


def training_recipe(context: GpuContext, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of configs/run/NAME.yaml for a few steps on the context's device."""
    folder = context.work / "training"
    places = [f"run.dir={folder}/run", f"data.folder={folder}/data", f"run.device={context.device}"]
    quiet = [
        "observe.progress=false",
        "observe.tensorboard=false",
        "observe.report=false",
        "run.fresh=true",
    ]
    recipe, _ = read(ROOT / f"configs/run/{name}.yaml", [*places, *quiet, *overrides])
    data: dict[str, Any] = encode(recipe)
    data["data"]["source"] = {"kind": "text", "paths": [str(path) for path in sources(context)]}
    if context.toy:
        data["model"] = _limited(data["model"])
        data["data"] |= {"sequence_length": 64, "workers": 1}
        data["train"] |= {"batch_size": 4, "micro_batch_size": 2}
        if data["precision"]["float8"] is None:
            data["precision"]["compute"] = "float32"
        data["parallel"]["compile"] = False
    changed = decode(Recipe, data)
    if problems := changed.check(1):
        raise ConfigError(problems)
    return changed


def sources(context: GpuContext) -> list[Path]:
    """Files of text: xscale's own sources, one document each."""
    return (
        [ROOT / "xscale/core/*.py"]
        if context.toy
        else [ROOT / "xscale/**/*.py", ROOT / "kernels/**/*.py"]
    )


def _limited(value: Any) -> Any:
    if isinstance(value, dict):
        limited = {}
        for key, item in value.items():
            is_size = key in TOY and isinstance(item, int) and not isinstance(item, bool)
            limited[key] = min(item, TOY[key]) if is_size else _limited(item)
        return limited
    return [_limited(item) for item in value] if isinstance(value, list) else value
