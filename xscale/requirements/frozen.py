"""Requirements of frozen parameters, LoRA and initial weights on the model and on the engine."""

import fnmatch
from collections.abc import Iterator

from torch import nn

from xscale.core.errors import Problem
from xscale.core.requirements import instead, reads, take, with_paths
from xscale.mesh.axes import MeshConfig
from xscale.nn.adapt.lora import LoraConfig, lora_paths
from xscale.nn.ffn.sparse import SparseFfn
from xscale.nn.linear import Linear
from xscale.nn.mixer.attention import Attention
from xscale.nn.model.model import Model
from xscale.optim.groups import nearest_patterns
from xscale.parallel.config import ParallelConfig
from xscale.parallel.pipeline.schedule import SCHEDULES, schedule_of
from xscale.settings.settings import Settings, TrainConfig


def frozen_patterns_match(built_model: nn.Module, train: TrainConfig) -> Iterator[Problem]:
    """Each pattern of frozen parameters has one."""
    names = [name for name, _ in built_model.named_parameters()]
    for index, pattern in enumerate(train.freeze):
        if not fnmatch.filter(names, pattern):
            what = f"no parameter has a name that matches '{pattern}'"
            nearest = take(*nearest_patterns(pattern, names))
            yield Problem(f"train.freeze.{index}", what, choices=nearest)


@reads("lora", "parallel")
def lora_can_be_added(
    settings: Settings, built_model: nn.Module, parallel: ParallelConfig, model: Model.Config
) -> list[Problem]:
    """LoRA has linear maps to be added to, each of which a rank has in full."""
    if settings.lora is None:
        return []
    problems = _check_lora(built_model, settings.lora, parallel.mesh)
    return [with_paths(problem, model, "model") for problem in problems]


def parameters_are_trained(
    built_model: nn.Module, lora_can_be_added: tuple[Problem, ...]
) -> Iterator[Problem]:
    """Some parameter is trained. LoRA that is added to no map leaves none, which no pattern is to blame for."""
    if not lora_can_be_added and not any(
        parameter.requires_grad for parameter in built_model.parameters()
    ):
        what = "freezes all parameters"
        yield Problem(
            "train.freeze", what, "Leave out the pattern of those to be trained.", choices=take([])
        )


@reads("init")
def engine_reads_initial_weights(settings: Settings, parallel: ParallelConfig) -> Iterator[Problem]:
    """Weights from elsewhere are read into parameters that are the model's own."""
    if settings.init.from_ is not None and parallel.zero.engine == "deepspeed":
        what = "DeepSpeed keeps the parameters in tensors of its own, into which no other weights are read"
        choices = take("torch", key="parallel.zero.engine") + take(None, key="init.from")
        yield Problem("init.from", what, choices=choices)


@reads("lora")
def frozen_weights_need_no_gradient(
    settings: Settings, train: TrainConfig, parallel: ParallelConfig
) -> Iterator[Problem]:
    """The pipeline's schedule and the engine can leave out the gradients of frozen weights."""
    if not train.freeze and settings.lora is None:
        return
    schedule = schedule_of(parallel.pipeline)
    if parallel.mesh.pp > 1 and schedule.splits_backward:
        kind = schedule.name
        what = f"the schedule {kind} computes the gradients of a stage's weights by themselves, and some are frozen"
        able = [other.name for other in SCHEDULES.values() if not other.splits_backward]
        yield Problem("parallel.pipeline.schedule", what, choices=take(*able))
    if parallel.zero.engine == "deepspeed":
        what = "DeepSpeed flattens parameters into one tensor, which is trained as a whole"
        choices = take("torch", key="parallel.zero.engine")
        yield Problem("train.freeze" if train.freeze else "lora", what, choices=choices)


def _check_lora(model: nn.Module, config: LoraConfig, mesh: MeshConfig) -> list[Problem]:
    """List the patterns of LoRA that match no linear map, and the maps that it cannot be added to."""
    maps = [path for path, module in model.named_modules() if isinstance(module, Linear)]
    problems: list[Problem] = []
    tp = mesh.tp
    if config.dropout and mesh.cp > 1:
        what = "draws over the sequence, of which each rank of cp has a shard"
        problems.append(
            Problem("lora.dropout", what, choices=take(0.0) + take(1, key="parallel.mesh.cp"))
        )
    for index, pattern in enumerate(config.match):
        where, paths = f"lora.match.{index}", lora_paths(model, pattern)
        patterns = [other for other in config.match if other != pattern]
        without = take(patterns, key="lora.match")
        if not paths:
            what = f"no linear map has a path that matches '{pattern}'"
            nearest = take(*nearest_patterns(pattern, maps))
            problems.append(Problem(where, what, choices=nearest))
        for path in paths:
            parent = model.get_submodule(path.rpartition(".")[0])
            if isinstance(parent, SparseFfn):
                what = f"{path} is read by blocks, to which LoRA adds nothing"
                choices = without + instead("ffn", str(parent.Config.kind), ["dense", "gated"])
                problems.append(Problem(where, what, choices=choices))
            linear = model.get_submodule(path)
            fewer = isinstance(parent, Attention) and parent.key_channels // parent.head_width < tp
            if fewer and isinstance(linear, Linear) and "kv_heads" in linear.axes["weight"]:
                what = f"tp={tp} replicates {path}, which has fewer kv_heads than ranks"
                lower = take(*range(tp - 1, 0, -1), key="parallel.mesh.tp")
                problems.append(Problem(where, what, choices=lower + without))
            sharded = isinstance(linear, Linear) and linear.axes["weight"][1] not in (
                "width",
                "state",
            )
            if config.dropout and tp > 1 and sharded:
                what = f"{path} reads channels that tp={tp} shards, of which no rank draws the whole mask"
                choices = take(0.0) + take(1, key="parallel.mesh.tp")
                problems.append(Problem("lora.dropout", what, choices=choices + without))
            if path.startswith("head."):
                what = f"{path} is of the head, which is trained as a whole or not at all"
                problems.append(Problem(where, what, choices=without))
    return list({problem.path: problem for problem in problems}.values())


REQUIREMENTS = (
    frozen_patterns_match,
    parameters_are_trained,
    engine_reads_initial_weights,
    lora_can_be_added,
    frozen_weights_need_no_gradient,
)
