"""Set up a run from its settings: mesh, data, model, engine and micro-batches."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xscale.checkpoint.load import read_state, unpadded_vocabulary_of
from xscale.checkpoint.search import newest_on_this_process
from xscale.core.errors import ConfigError, Problem
from xscale.data.corpus.prepare import missing_files
from xscale.data.samples.loader import Corpus, Loader
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.distill.distill import distil
from xscale.distill.distill_check import check_teacher_on_disk
from xscale.measure.device import peak_flops
from xscale.measure.flops import size, training_flops
from xscale.mesh import axes
from xscale.mesh.consensus import Consensus
from xscale.mesh.environment import RankInfo, read_rank_info
from xscale.mesh.mesh import Mesh, init_mesh
from xscale.mesh.shared_folder import require_shared
from xscale.nn.module import draws_dropout
from xscale.objective.objective import OBJECTIVES, Objective, SpecialTokens
from xscale.optim.optimizer.optimizer import OPTIMIZERS, LocalParameter, Optimizer
from xscale.optim.schedule import SCHEDULES
from xscale.parallel import context, cuda_graph, deepep
from xscale.parallel.ema import ExponentialMovingAverage
from xscale.parallel.engine.fsdp import FsdpEngine, optimizer_weights
from xscale.parallel.engine.protocol import Engine
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.precision import float8
from xscale.parallel.shard.full_tensors import ShardedTensors
from xscale.parallel.shard.sharded import ShardedParameter, sharded_parameters
from xscale.run.config_changes import check_same_config
from xscale.run.init_weights import adopt_tokenizer
from xscale.run.parts import RunParts, device_of
from xscale.run.route_replay import open_replay, with_routes
from xscale.run.run_data import (
    data_of_run,
    evaluation_sequences,
    make_micro_batches,
    padding_note,
    prepare_and_open_data,
    require_text_of_memory,
    special_tokens_of,
    with_caller_samples,
    with_training_states,
)
from xscale.run.run_folder import CHECKPOINTS
from xscale.settings.settings import Settings, build_on_meta
from xscale.step.micro_batch_graphs import MicroBatchGraphs
from xscale.step.stepper import Stepper
from xscale.watchdog.watchdog import naming_lost_ranks
from xscale_kernels import attention_backends


def check_machine(settings: Settings, invalid: Collection[str] = ()) -> list[Problem]:
    """List what this machine lacks: the device, and files of the data. Sections in `invalid` are not looked at."""
    problems: list[Problem] = []
    if "run" not in invalid:
        try:
            device = device_of(settings, read_rank_info())
            refused = (
                None
                if "precision" in invalid
                else float8.unsupported_device(settings.precision, device)
            )
            dispatch = (
                None
                if "parallel" in invalid
                else deepep.unsupported_device(settings.parallel, device)
            )
            problems += [problem for problem in (refused, dispatch) if problem is not None]
        except ConfigError as error:
            problems += error.problems
    problems += (
        [] if "distill" in invalid or "model" in invalid else check_teacher_on_disk(settings)
    )
    return problems if "data" in invalid else problems + missing_files(data_of_run(settings)[0])


@naming_lost_ranks()
def set_up(
    settings: Settings, rank_info: RankInfo, *, resumes: bool = False, samples: Any = None
) -> RunParts:
    """Set up the run. Collective over all ranks. ConfigError for problems that only the data or the machine shows.

    With `resumes` no weights are drawn where there is a checkpoint, which the caller then loads. `samples`: the
    training samples, where they are not those of the data.
    """
    # Rank 0 prepares the data for all, so that it alone looks for files.
    if problems := check_machine(settings, invalid=["data"]):
        of_data = check_machine(settings, invalid=["run"]) if rank_info.is_rank0 else []
        raise ConfigError(problems + of_data)
    mesh = _mesh_of(settings, rank_info)
    device, degrees = mesh.device, mesh.degrees
    adopt_tokenizer(settings, mesh)
    corpus = prepare_and_open_data(settings, rank_info, *data_of_run(settings), mesh)
    corpus = with_caller_samples(settings, corpus, samples)
    tokenizer = corpus.tokenizer
    unpadded = _unpadded_vocabulary(settings, mesh, tokenizer)
    specials = replace(special_tokens_of(tokenizer), vocabulary=unpadded)
    source_length = settings.data.source_length
    model = build_on_meta(settings, tokenizer.vocabulary, unpadded)
    plan = _checked_plan(settings, model, specials, corpus, rank_info.world)
    replay = open_replay(model, tokenizer, Consensus(mesh.background, "read"))
    counted, flops = size(model), training_flops(model, settings.data.target_length, source_length)
    sharding = context.sequence_sharding_of(model, mesh, settings.parallel)
    backends = attention_backends.sentences(device, dropout=draws_dropout(model))
    applied = padding_note(tokenizer) + backends
    draw_weights = not resumes or not _has_checkpoint(settings, mesh)
    model = plan.apply(model, mesh, settings.run.seed, applied.append, draw_weights=draw_weights)
    parameters = sharded_parameters(model)
    objective, replay_lines = with_routes(replay, model, _objective_of(settings, specials))
    objective, lines = distil(settings, objective, model, tokenizer, mesh, fresh=draw_weights)
    applied += replay_lines + lines
    engine = make_engine(settings, model, parameters, mesh)
    graphs = _graphs(settings, model, objective, engine, device)
    micro_batches = partial(
        make_micro_batches, settings, objective=objective, mesh=mesh, sharding=sharding, model=model
    )
    return RunParts(
        settings=settings,
        mesh=mesh,
        corpus=corpus,
        objective=objective,
        model=model,
        parameters=parameters,
        applied=tuple(applied),
        schedule=SCHEDULES.build(settings.schedule, settings.train.steps),
        stepper=Stepper(engine, objective, device, degrees.tp * degrees.pp, graphs),
        training=with_training_states(micro_batches(corpus.train), settings.train.batch_size),
        validation=None if corpus.validation is None else micro_batches(corpus.validation),
        eval_sequences=_evaluation_sequences(settings, corpus.validation),
        token_bytes=torch.from_numpy(tokenizer.byte_lengths()).to(device),
        model_size=counted,
        flops_per_sample=flops,
        peak=peak_flops(device, plan.compute),
        has_weights=draw_weights,
    )


def _objective_of(settings: Settings, specials: SpecialTokens) -> Objective:
    """The objective of the run."""
    of_data = (settings.data.source_length, settings.run.seed)
    objective: Objective = OBJECTIVES.build(settings.objective, specials, *of_data)
    return objective


def _mesh_of(settings: Settings, rank_info: RankInfo) -> Mesh:
    """The device mesh of the run, after all ranks agree on its config and see one run folder. Collective."""
    parallel = settings.parallel
    device = device_of(settings, rank_info)
    mesh = init_mesh(
        rank_info,
        axes.resolve(parallel.mesh, rank_info.world),
        device,
        parallel.longest_timeout_seconds,
        lambda: check_same_config(settings),
        parallel.io_timeout_seconds,
    )
    require_shared(Consensus(mesh.background), Path(settings.run.dir), "run.dir")
    return mesh


def _checked_plan(
    settings: Settings, model: nn.Module, specials: SpecialTokens, corpus: Corpus, world: int
) -> ParallelPlan:
    """The plan of the model over `world` ranks. ConfigError for what it or the objective cannot do with this model, and
    for a memory that is longer than the text."""
    require_text_of_memory(settings, model, corpus)
    data, objective = settings.data, settings.objective
    plan = ParallelPlan(settings.parallel, settings.precision, data.sequence_length)
    objective_type = OBJECTIVES.of(objective).part
    problems = plan.check(model, world)
    problems += objective_type.check(objective, specials, data.source_length, "objective")
    if problems:
        raise ConfigError(problems)
    return plan


def _unpadded_vocabulary(settings: Settings, mesh: Mesh, tokenizer: Tokenizer) -> int:
    """Rows of the vocabulary that have a probability, as the run began; of a new run those of tokens. Collective."""
    folder = Path(settings.run.dir) / CHECKPOINTS

    def read() -> int:
        newest = newest_on_this_process(folder)
        if newest is None:
            return tokenizer.unpadded_vocabulary
        return unpadded_vocabulary_of(read_state(newest[1]), tokenizer.vocabulary)

    return Consensus(mesh.background).on_rank0(folder, read)


def _has_checkpoint(settings: Settings, mesh: Mesh) -> bool:
    """Whether the run has a checkpoint to read weights from, by the torch engine, as rank 0 sees it. Collective."""
    folder = Path(settings.run.dir) / CHECKPOINTS
    newest = Consensus(mesh.background).on_rank0(folder, lambda: newest_on_this_process(folder))
    return newest is not None and settings.parallel.zero.engine == "torch"


def make_engine(
    settings: Settings, model: nn.Module, parameters: list[ShardedParameter], mesh: Mesh
) -> Engine:
    """The engine that owns parameters, gradients and optimizer states."""
    clip, degrees = settings.train.clip_grad_norm, mesh.degrees
    if settings.parallel.zero.engine == "deepspeed":
        from xscale.parallel.engine.deepspeed.engine import DeepSpeedEngine

        def build(flat: Tensor, decays: bool) -> Optimizer:
            optimizer: Optimizer = OPTIMIZERS.build(
                settings.optimizer, [LocalParameter("", flat, decays)]
            )
            optimizer.kernel_choices = settings.kernels
            return optimizer

        size = settings.train.micro_batch_size
        count = settings.train.batch_size // (size * degrees.dp)
        return DeepSpeedEngine(
            model,
            mesh,
            settings.parallel,
            build,
            clip_grad_norm=clip,
            micro_batch=size,
            micro_batches=count,
        )
    # Parameters that no gradient reaches, such as a router's balancing bias, are saved but not optimized.
    trained = [parameter for parameter in parameters if parameter.parameter.requires_grad]
    optimizer: Optimizer = OPTIMIZERS.build(settings.optimizer, optimizer_weights(trained))
    optimizer.kernel_choices = settings.kernels
    optimizer.full_tensors = ShardedTensors([parameter.parameter for parameter in trained])
    decay = settings.train.ema_decay
    return FsdpEngine(
        model,
        settings.parallel,
        optimizer,
        parameters,
        mesh.device,
        mesh.rank_info.world,
        clip,
        repeats=degrees.tp,
        stages=degrees.pp,
        kernel_choices=settings.kernels,
        ema=None if decay is None else ExponentialMovingAverage(model, trained, decay),
    )


def _evaluation_sequences(settings: Settings, validation: Loader | None) -> int:
    """Sequences of an evaluation; 0 without a validation split."""
    if validation is None:
        return 0
    return evaluation_sequences(len(validation.data), settings.train.eval_sequences)


def _graphs(
    settings: Settings, model: nn.Module, objective: Objective, engine: Engine, device: torch.device
) -> MicroBatchGraphs | None:
    """Return what captures micro-batches as CUDA graphs; None: the run has none."""
    if not settings.parallel.cuda_graphs:
        return None
    cuda_graph.require_cuda(device)
    return MicroBatchGraphs(model, objective.loss, engine.backward)
