"""Steps of a parallel plan: what each kind of parallelism checks, estimates and applies, in the one order there is."""

from torch import nn

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.mesh.mesh import Mesh
from xscale.nn.roles import Role
from xscale.parallel import (
    batch_statistics,
    context,
    cuda_graph,
    deepep,
    expert,
    reversible,
    sentence_contrast,
)
from xscale.parallel.compiled_blocks import blocks_of, compile_blocks
from xscale.parallel.engine.deepspeed import check as deepspeed
from xscale.parallel.pipeline import check as pipeline
from xscale.parallel.plan_step import FillParameters, Step, StepSettings, _Step
from xscale.parallel.precision import float8, loss_scale
from xscale.parallel.recompute import activation_checkpointing
from xscale.parallel.roles import seams_in
from xscale.parallel.shard import zero
from xscale.parallel.tensor import apply as tensor


class PipelineStep(_Step):
    name = "pipeline"

    def check(self, model: nn.Module | None, settings: StepSettings) -> list[Problem]:
        return (
            []
            if model is None
            else pipeline.check(model, settings.parallel, "parallel", settings.length)
        )

    def estimate(self, model: nn.Module, settings: StepSettings) -> dict[str, object]:
        from xscale.parallel.pipeline import simulate

        pp, config = settings.parallel.mesh.pp, settings.parallel.pipeline
        return (
            {}
            if pp == 1
            else simulate.estimate(model, config, pp, settings.micro_batches, settings.length)
        )

    def apply(
        self, model: nn.Module, settings: StepSettings, mesh: Mesh, fill: FillParameters
    ) -> tuple[nn.Module, str | None]:
        pp = mesh.degrees.pp
        if pp == 1:
            return model, None
        from xscale.parallel.pipeline import executor
        from xscale.parallel.pipeline.split import block_paths

        paths = block_paths(model)
        staged = executor.apply(model, mesh, settings.parallel, settings.compute, settings.length)
        local = [str(paths.index(block.path)) for block in blocks_of(staged) if block.path in paths]
        schedule = settings.parallel.pipeline.schedule
        return (
            staged,
            f"Applied pipeline parallelism pp={pp}, schedule {schedule}, blocks {_ranges(local)} on this rank",
        )


class PrecisionStep(_Step):
    name = "precision"

    def check(self, model: nn.Module | None, settings: StepSettings) -> list[Problem]:
        precision = settings.precision
        if model is not None:
            return []
        if precision.compute != "float64" or precision.master == "float64":
            return loss_scale.check(precision, "precision")
        what = "master parameters would have a narrower dtype than the computation"
        narrower = take("float32", "bfloat16", key="precision.compute")
        return [Problem("precision.master", what, choices=take("float64") + narrower)]

    def apply(
        self, model: nn.Module, settings: StepSettings, mesh: Mesh, fill: FillParameters
    ) -> tuple[nn.Module, str | None]:
        # Imported where used, here and below: DTensor takes as long to import as half of torch.
        from xscale.parallel.precision import precision

        names = settings.precision
        precision.apply(model, settings.compute, settings.master)
        precision.set_float32_matmul(names.float32_matmul)
        done = []
        if names.compute != names.master:
            done.append(
                f"mixed precision: compute in {names.compute}, master parameters in {names.master}"
            )
        if names.float32_matmul != "highest":
            done.append(f"float32 matmuls of {names.float32_matmul} precision")
        return model, f"Applied {' and '.join(done)}" if done else None


class ShardingStep(_Step):
    name = "sharding"

    def apply(
        self, model: nn.Module, settings: StepSettings, mesh: Mesh, fill: FillParameters
    ) -> tuple[nn.Module, str | None]:
        from torch.distributed.tensor import DTensor

        from xscale.parallel.shard import sharding
        from xscale.parallel.shard.sharded import stage_models

        for stage in stage_models(model):
            replicated = tensor.replicated_parameters(stage, mesh.degrees.tp)
            sharding.apply(stage, mesh, settings.parallel, replicated)
        count = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
        axes = ", ".join(
            f"{axis}={getattr(mesh.degrees, axis)}"
            for axis in ("tp", "ep")
            if _degree(mesh, axis) > 1
        )
        return model, f"Sharded {count} parameters over {axes}" if count else None


class ContextStep(_Step):
    name = "context"

    def check(self, model: nn.Module | None, settings: StepSettings) -> list[Problem]:
        return [] if model is None else context.check(model, settings.parallel, "parallel")

    def estimate(self, model: nn.Module, settings: StepSettings) -> dict[str, object]:
        return dict(context.estimate(model, settings.parallel, settings.length))

    def apply(
        self, model: nn.Module, settings: StepSettings, mesh: Mesh, fill: FillParameters
    ) -> tuple[nn.Module, str | None]:
        if not context.apply(model, mesh, settings.parallel):
            return model, None
        attentions = seams_in(model.modules(), Role.ATTENTION)
        styles = sorted(
            {str(context.style_of(module, settings.parallel)) for module, *_ in attentions}
        )
        style = ", ".join(styles) or "no attention"
        return (
            model,
            f"Applied context parallelism cp={mesh.degrees.cp} ({style}) to {len(blocks_of(model))} blocks",
        )


class BatchStatisticsStep(_Step):
    name = "batch statistics"

    def apply(
        self, model: nn.Module, settings: StepSettings, mesh: Mesh, fill: FillParameters
    ) -> tuple[nn.Module, str | None]:
        sentence_contrast.apply(model, mesh)
        count = batch_statistics.apply(model, mesh)
        return (
            model,
            f"Applied statistics over all data-parallel ranks to {count} batch norms"
            if count
            else None,
        )


class ExpertStep(_Step):
    name = "expert"

    def check(self, model: nn.Module | None, settings: StepSettings) -> list[Problem]:
        if model is None:
            return []
        problems = expert.check(model, settings.parallel.mesh.ep, "parallel.mesh")
        return problems + deepep.check(model, settings.parallel, settings.precision, "parallel")

    def apply(
        self, model: nn.Module, settings: StepSettings, mesh: Mesh, fill: FillParameters
    ) -> tuple[nn.Module, str | None]:
        expert.apply(model, mesh, settings.parallel.expert)
        if mesh.degrees.ep == 1:
            return model, None
        layers, dispatch = len(list(seams_in(model.modules(), Role.DISPATCH))), ""
        if settings.parallel.expert.dispatch != "all_to_all":
            dispatch = f", dispatch by {settings.parallel.expert.dispatch},"
        return (
            model,
            f"Applied expert parallelism ep={mesh.degrees.ep}{dispatch} to {layers} MoE layers",
        )


class TensorStep(_Step):
    name = "tensor"

    def check(self, model: nn.Module | None, settings: StepSettings) -> list[Problem]:
        return [] if model is None else tensor.check(model, settings.parallel, "parallel")

    def estimate(self, model: nn.Module, settings: StepSettings) -> dict[str, object]:
        if settings.parallel.mesh.tp == 1:
            return {}
        return dict(tensor.estimate(model, settings.parallel, settings.length, settings.length))

    def apply(
        self, model: nn.Module, settings: StepSettings, mesh: Mesh, fill: FillParameters
    ) -> tuple[nn.Module, str | None]:
        tensor.apply(model, mesh, settings.parallel)
        if mesh.degrees.tp == 1:
            return model, None
        sequence = " with sequence parallelism" if settings.parallel.tensor.sequence else ""
        return (
            model,
            f"Applied tensor parallelism tp={mesh.degrees.tp}{sequence} to {len(blocks_of(model))} blocks",
        )


class Float8Step(_Step):
    name = "float8"

    def check(self, model: nn.Module | None, settings: StepSettings) -> list[Problem]:
        return [] if model is None else float8.check(model, settings.precision, "precision")

    def apply(
        self, model: nn.Module, settings: StepSettings, mesh: Mesh, fill: FillParameters
    ) -> tuple[nn.Module, str | None]:
        return model, float8.apply(model, settings.precision)


class ActivationCheckpointingStep(_Step):
    name = "activation checkpointing"

    def check(self, model: nn.Module | None, settings: StepSettings) -> list[Problem]:
        if model is None:
            return activation_checkpointing.check(settings.parallel, "parallel")
        return reversible.check(model, settings.parallel, "parallel")

    def apply(
        self, model: nn.Module, settings: StepSettings, mesh: Mesh, fill: FillParameters
    ) -> tuple[nn.Module, str | None]:
        config = settings.parallel.recompute
        reconstructed = reversible.apply(model) if config.reversible else 0
        if reconstructed:
            return (
                model,
                f"Applied reconstruction of the inputs of {reconstructed} reversible blocks",
            )
        count = activation_checkpointing.apply(model, config)
        if not count:
            return model, None
        offloads = ", whose inputs are offloaded to CPU memory" if config.offload else ""
        return (
            model,
            f"Applied {config.granularity} activation checkpointing to {count} blocks{offloads}",
        )


class CompileStep(_Step):
    name = "compile"

    def check(self, model: nn.Module | None, settings: StepSettings) -> list[Problem]:
        if model is not None:
            return cuda_graph.check_model(model, settings.parallel, "parallel")
        ranks = 1 if settings.degrees is None else settings.degrees.world
        return cuda_graph.check(settings.parallel, "parallel", ranks)

    def apply(
        self, model: nn.Module, settings: StepSettings, mesh: Mesh, fill: FillParameters
    ) -> tuple[nn.Module, str | None]:
        lines = []
        if settings.parallel.compile:
            compile_blocks(model)
            lines.append(f"Applied torch.compile to {len(blocks_of(model))} blocks")
        if settings.parallel.cuda_graphs:
            cuda_graph.apply(model)
            lines.append("Applied CUDA graphs to forward and backward of micro-batches")
        return model, "; ".join(lines) or None


class ZeroStep(_Step):
    name = "zero"

    def check(self, model: nn.Module | None, settings: StepSettings) -> list[Problem]:
        if model is not None:
            return deepspeed.check_model(model, settings.parallel, "parallel")
        if settings.degrees is None:
            return []
        problems = zero.check(settings.parallel, settings.degrees, "parallel")
        return problems + deepspeed.check(
            settings.parallel, settings.precision, settings.degrees, "parallel"
        )

    def apply(
        self, model: nn.Module, settings: StepSettings, mesh: Mesh, fill: FillParameters
    ) -> tuple[nn.Module, str | None]:
        config = settings.parallel.zero
        if mesh.dense is None or config.engine != "torch":
            return model, None
        from xscale.parallel.shard.sharded import stage_models

        for stage in stage_models(model):
            zero.apply(stage, mesh, settings.parallel, settings.compute, settings.master)
        ranks = mesh.degrees.dp_replicate * mesh.degrees.dp_shard * mesh.degrees.cp
        return model, f"Applied ZeRO-{config.stage} (fully_shard) over {ranks} ranks"


class MaterializeStep(_Step):
    name = "materialize"

    def apply(
        self, model: nn.Module, settings: StepSettings, mesh: Mesh, fill: FillParameters
    ) -> tuple[nn.Module, str | None]:
        from xscale.parallel.engine.deepspeed.partition import make_plain
        from xscale.parallel.shard.sharded import sharded_parameters, stage_models

        for stage in stage_models(model):
            fill(stage)
            if settings.parallel.zero.engine == "deepspeed":
                make_plain(stage)
        count = sum(parameter.local.numel() for parameter in sharded_parameters(model))
        return model, f"Materialized {count:,} parameters on this rank"


STEPS: tuple[Step, ...] = (
    PipelineStep(),
    PrecisionStep(),
    ShardingStep(),
    ContextStep(),
    BatchStatisticsStep(),
    ExpertStep(),
    TensorStep(),
    Float8Step(),
    ActivationCheckpointingStep(),
    CompileStep(),
    ZeroStep(),
    MaterializeStep(),
)
"""All steps, in the order in which they are applied."""


def _degree(mesh: Mesh, axis: str) -> int:
    return int(getattr(mesh.degrees, axis))


def _ranges(numbers: list[str]) -> str:
    """Join consecutive numbers: 0, 1, 2, 6, 7 -> 0-2, 6-7."""
    ranges: list[list[int]] = []
    for number in sorted(int(text) for text in numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
