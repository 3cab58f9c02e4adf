"""Checks of what DeepSpeed cannot do, made before any process is started."""

from importlib.util import find_spec

from torch import nn

from xscale.core.errors import Problem
from xscale.core.requirements import change, take
from xscale.mesh.axes import Degrees
from xscale.parallel.config import ParallelConfig, PrecisionConfig


def check(
    config: ParallelConfig, precision: PrecisionConfig, degrees: Degrees, path: str
) -> list[Problem]:
    """Problems of the settings; `path` is the dotted path of section `parallel`."""
    zero = f"{path}.zero"
    if config.zero.engine == "torch":
        offload = config.zero.offload
        if (offload.optimizer, offload.parameters) == ("none", "none"):
            return []
        what = "the torch engine does not offload"
        nothing = change(
            (f"{zero}.offload.optimizer", "none"), (f"{zero}.offload.parameters", "none")
        )
        return [
            Problem(
                f"{zero}.offload", what, choices=take("deepspeed", key=f"{zero}.engine") + nothing
            )
        ]
    if find_spec("deepspeed") is None:
        what = "the package deepspeed is not installed"
        return [
            Problem(
                f"{zero}.engine",
                what,
                "Or run: pip install 'deepspeed>=0.19,<0.20'.",
                choices=take("torch"),
            )
        ]
    return (
        _layout(config, degrees, path) + _offload(config, zero) + _numbers(config, precision, path)
    )


def check_model(model: nn.Module, config: ParallelConfig, path: str) -> list[Problem]:
    """Problems of a model on meta."""
    fixed = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if config.zero.engine == "torch" or config.zero.stage < 3 or not fixed:
        return []
    what = f"DeepSpeed's stage 3 would shard {fixed[0]} too, which has no gradient"
    without = "bias_update_rate, the core routing_transformer, trainable=false"
    fix = f"Or take a model without it ({without})."
    return [
        Problem(
            f"{path}.zero.stage",
            what,
            fix,
            choices=take(1, 2) + take("torch", key=f"{path}.zero.engine"),
        )
    ]


def _layout(config: ParallelConfig, degrees: Degrees, path: str) -> list[Problem]:
    problems, torch = [], take("torch", key=f"{path}.zero.engine")
    if degrees.world == 1:
        what = "DeepSpeed shards over several processes, and there is one"
        fix = "Or start several: xscale launch local --processes 2."
        problems.append(Problem(f"{path}.zero.engine", what, fix, choices=torch))
    if config.zero.stage == 0:
        what = "stage 0 shards nothing"
        problems.append(Problem(f"{path}.zero.stage", what, choices=take(1, 2, 3) + torch))
    if degrees.pp > 1:
        what = (
            "DeepSpeed cannot run our pipeline: it would miss the gradients of all stages but one"
        )
        problems.append(
            Problem(f"{path}.mesh.pp", what, "Or take tp or cp.", choices=torch + take(1))
        )
    if degrees.dp_replicate > 1:
        what = "DeepSpeed shards over all data-parallel ranks and does not replicate such groups"
        problems.append(Problem(f"{path}.mesh.dp_replicate", what, choices=take(1) + torch))
    if degrees.has_expert_layout:
        what = (
            "DeepSpeed reduces gradients over all data-parallel ranks, and these experts are sharded otherwise; "
            "it supports only its own MoE layers, by private groups, and those not at stage 3"
        )
        alone = change(("", 1), (f"{path}.mesh.tp_in_experts", True)) if degrees.tp > 1 else take(1)
        problems.append(Problem(f"{path}.mesh.ep", what, choices=alone + torch))
    return problems


def _offload(config: ParallelConfig, zero: str) -> list[Problem]:
    offload, problems = config.zero.offload, []
    places = {offload.optimizer, offload.parameters}
    if offload.parameters != "none" and config.zero.stage < 3:
        what = f"at stage {config.zero.stage} parameters are replicated and stay on the device"
        choices = take("none") + take(3, key=f"{zero}.stage")
        problems.append(Problem(f"{zero}.offload.parameters", what, choices=choices))
    if offload.optimizer == "nvme" and config.zero.stage < 3:
        what = f"DeepSpeed offloads the states of stage {config.zero.stage} to the CPU only"
        problems.append(
            Problem(
                f"{zero}.offload.optimizer",
                what,
                choices=take("cpu") + take(3, key=f"{zero}.stage"),
            )
        )
    if offload.parameters != "none" and offload.optimizer == "none":
        what = "DeepSpeed cannot keep states on the device when it offloads the parameters"
        problems.append(Problem(f"{zero}.offload.optimizer", what, choices=take("cpu", "nvme")))
    nvme = "optimizer" if offload.optimizer == "nvme" else "parameters"
    if "nvme" in places and offload.folder is None:
        problems.append(
            Problem(
                f"{zero}.offload.folder",
                "nvme offload needs a folder",
                "Or give one on a local disk.",
                choices=take("cpu", key=f"{zero}.offload.{nvme}"),
            )
        )
    if "nvme" not in places and offload.folder is not None:
        what = "a folder is given, and nothing is offloaded to nvme"
        problems.append(
            Problem(
                f"{zero}.offload.folder",
                what,
                choices=take(None) + take("nvme", key=f"{zero}.offload.optimizer"),
            )
        )
    if "nvme" in places and (reason := missing_async_io()):
        fix, choices = (
            "Or install it (on Debian: apt-get install libaio-dev).",
            take("cpu", key=f"{zero}.offload.{nvme}"),
        )
        problems.append(Problem(f"{zero}.offload", reason, fix, choices=choices))
    return problems


def missing_async_io() -> str | None:
    """Why DeepSpeed's asynchronous I/O cannot be built on this machine; None when it can."""
    from xscale.parallel.engine.deepspeed.engine import has_async_io

    return (
        None
        if has_async_io()
        else "DeepSpeed needs libaio to read and write nvme, and it is not installed"
    )


def _numbers(config: ParallelConfig, precision: PrecisionConfig, path: str) -> list[Problem]:
    problems, torch = [], take("torch", key=f"{path}.zero.engine")
    if precision.master == "float64":
        what = "DeepSpeed stores parameters in float32"
        problems.append(Problem("precision.master", what, choices=take("float32") + torch))
    if precision.compute == "float16":
        what = "DeepSpeed would scale the loss by itself, and its scale is not saved here"
        problems.append(Problem("precision.compute", what, choices=take("bfloat16") + torch))
    if precision.float8 is not None:
        what = "float8 matmuls are not supported with DeepSpeed"
        problems.append(Problem("precision.float8", what, choices=take(None) + torch))
    if config.compile and config.zero.stage == 3:
        what = "DeepSpeed's stage 3 fetches parameters inside a block's forward, which torch.compile cannot capture"
        problems.append(
            Problem(
                f"{path}.compile",
                what,
                choices=take(False) + take(1, 2, key=f"{path}.zero.stage") + torch,
            )
        )
    return problems
