"""DeepSpeed's universal checkpoints (Lian et al. 2024): one folder per parameter, with its full weight and states."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xscale.checkpoint.load import CheckpointReader, read_config, read_state
from xscale.checkpoint.tools.tools import find_checkpoint
from xscale.checkpoint.torch_file import load_torch_file
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.core.files.atomic_write import writing_folder
from xscale.core.files.file_safety import open_regular
from xscale.core.foreign import foreign_errors

WRITTEN_FOR = "0.19.8"
"""The version of DeepSpeed that the export was tested with."""
STATES = {"mean": "exp_avg", "square": "exp_avg_sq"}
"""AdamW's states: name in xscale -> name in DeepSpeed."""
PARAMETERS_FOLDER = "zero"
FIX = "Convert it again with DeepSpeed's ds_to_universal."


@dataclass(frozen=True)
class UniversalCheckpoint:
    """The content of a universal checkpoint."""

    weights: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    """State in xscale -> parameter name -> full tensor; empty if the folder has none."""
    step: int


def export_universal(path: Path, out: Path, *, say: Callable[[str], None] = print) -> int:
    """Export the newest checkpoint of a run, or the one at `path`, to a folder that DeepSpeed loads; the exit status.

    ConfigError when `out` exists, or DeepSpeed has no names for the optimizer's states.
    """
    path = find_checkpoint(path)
    if out.exists():
        raise ConfigError(str(out), "the folder already exists", "Give another name, or delete it.")
    opened, config = CheckpointReader(path), read_config(path)
    kind = config["optimizer"]["kind"]
    if kind != "adamw":
        what = f"its optimizer is '{kind}', whose states have no counterpart in DeepSpeed"
        raise ConfigError(
            str(path),
            what,
            "Only adamw can be exported; --to hf exports the weights without states.",
        )
    if config["optimizer"].get("groups"):
        what = "its optimizer has parameter groups, and DeepSpeed's file has one flat group for all matrices"
        raise ConfigError(
            str(path), what, "Export a run without optimizer.groups; --to hf exports the weights."
        )
    names = [name.removeprefix("model.") for name in opened.entries if name.startswith("model.")]
    step = int(read_state(path)["optimizer"]["step"])
    with writing_folder(out) as part:
        for name in names:
            folder = part / PARAMETERS_FOLDER / name
            folder.mkdir(parents=True)
            torch.save({"param": opened.tensor(f"model.{name}").float()}, folder / "fp32.pt")
            for state, deepspeed_state in STATES.items():
                if f"optimizer.{state}.{name}" in opened.entries:
                    torch.save(
                        {"param": opened.tensor(f"optimizer.{state}.{name}").float()},
                        folder / f"{deepspeed_state}.pt",
                    )
            torch.save(torch.tensor(float(step)), folder / "step.pt")
        groups = _groups(config["optimizer"])
        common = {
            "param_groups": groups,
            "ds_version": WRITTEN_FOR,
            "clip_grad": 0.0,
            "overflow": False,
        }
        state_dict = {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": groups}
        torch.save(
            {**common, "optimizer_state_dict": state_dict},
            part / PARAMETERS_FOLDER / "optimizer_state.pt",
        )
        module = {name: opened.tensor(f"model.{name}").float() for name in names}
        torch.save(_model_states(module, step), part / "mp_rank_00_model_states.pt")
        (part / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        part.rename(out)
    (out.parent / "latest_universal").write_text(out.name, encoding="utf-8")
    say(f"{out}: {len(names)} parameters with their states at step {step}, bit for bit")
    return EXIT_DONE


def _groups(optimizer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups of xscale's DeepSpeed engine: matrices with weight decay, the rest without."""
    common = {
        "lr": optimizer["lr"],
        "betas": (optimizer["beta1"], optimizer["beta2"]),
        "eps": optimizer["eps"],
    }
    return [
        {**common, "weight_decay": decay, "params": []}
        for decay in (optimizer["weight_decay"], 0.0)
    ]


def _model_states(module: dict[str, Tensor], step: int) -> dict[str, Any]:
    """Return the model states file that DeepSpeed's loader reads besides the parameter folders."""
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": WRITTEN_FOR,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }


def read_universal(source: Path) -> UniversalCheckpoint:
    """Read a folder written by DeepSpeed's `ds_to_universal` or by `export_universal`; ConfigError if it is not one."""
    names = sorted(_parameter_names(source))
    if not names:
        fix = (
            "Give a folder that DeepSpeed's ds_to_universal wrote (it has zero/PARAMETER/fp32.pt)."
        )
        raise ConfigError(str(source), "the folder has no universal checkpoint", fix)
    weights = {name: _read(source, name, "fp32") for name in names}
    states = {
        state: {
            name: _read(source, name, deepspeed_state)
            for name in names
            if (source / PARAMETERS_FOLDER / name / f"{deepspeed_state}.pt").exists()
        }
        for state, deepspeed_state in STATES.items()
    }
    step_files = [source / PARAMETERS_FOLDER / name / "step.pt" for name in names]
    steps = {_step(file) for file in step_files if file.exists()}
    if len(steps) > 1:
        what = f"its parameters are at different steps: {', '.join(map(str, sorted(steps)))}"
        raise ConfigError(str(source), what, "Convert a checkpoint of one step.")
    return UniversalCheckpoint(weights, states, steps.pop() if steps else 0)


def _parameter_names(source: Path) -> Iterator[str]:
    for file in (source / PARAMETERS_FOLDER).glob("*/fp32.pt"):
        yield file.parent.name


def _read(source: Path, name: str, state: str) -> Tensor:
    file = source / PARAMETERS_FOLDER / name / f"{state}.pt"
    content = _load(file)
    tensor = content.get("param") if isinstance(content, dict) else content
    if not isinstance(tensor, Tensor):
        raise ConfigError(str(file), "the file does not hold a tensor", FIX)
    return tensor


def _step(file: Path) -> int:
    step = _load(file)
    try:
        count = int(step)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        count = -1
    if count < 0:
        raise ConfigError(str(file), "the file does not hold a step", FIX)
    return count


def _load(path: Path) -> Any:
    with foreign_errors(path, "the file cannot be read", FIX), open_regular(path) as file:
        return load_torch_file(file)
