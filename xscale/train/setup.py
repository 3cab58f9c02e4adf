"""Set up a run from its settings: mesh, data, model, engine and micro-batches."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from xscale.checkpoint.load import read_state, unpadded_vocabulary_of
from xscale.checkpoint.search import newest_on_this_process
from xscale.core.errors import ConfigError, Problem
from xscale.data.config import DataConfig
from xscale.data.loader import Corpus, Loader, open_corpus
from xscale.data.prepare import missing_files, prepare, require_run_tokenizer
from xscale.data.stored_tokenizer import open_stored_tokenizer, with_tokenizer
from xscale.data.tokenizer.tokenizer import UNUSED, Tokenizer
from xscale.measure.device import peak_flops
from xscale.measure.flops import Size, size, training_flops
from xscale.mesh import axes
from xscale.mesh.consensus import Consensus
from xscale.mesh.environment import RankInfo, read_rank_info
from xscale.mesh.mesh import Mesh, init_mesh
from xscale.objective.objective import OBJECTIVES, Objective, SpecialTokens
from xscale.optim.optimizer.optimizer import OPTIMIZERS, LocalParameter, Optimizer
from xscale.optim.schedule import SCHEDULES, Schedule
from xscale.parallel import context, deepep, float8
from xscale.parallel.ema import ExponentialMovingAverage
from xscale.parallel.engine.fsdp import FsdpEngine, optimizer_weights
from xscale.parallel.engine.protocol import Engine
from xscale.parallel.full_tensors import ShardedTensors
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.sharded import ShardedParameter, sharded_parameters
from xscale.train.batches import MicroBatches
from xscale.train.distill import distil
from xscale.train.distill_check import check_teacher_on_disk
from xscale.train.init_weights import adopt_tokenizer, adopted_tokenizer, data_with_adopted_tokenizer
from xscale.train.optimizer_step.stepper import Stepper
from xscale.train.run_folder import CHECKPOINTS, check_same_config
from xscale.train.settings import Settings, build_on_meta, labels_problems, records_problem


@dataclass(frozen=True)
class RunParts:
    """Everything a run's loop uses."""

    settings: Settings
    mesh: Mesh
    corpus: Corpus
    objective: Objective
    model: nn.Module
    parameters: list[ShardedParameter]
    applied: tuple[str, ...]
    """One line for each step of the parallel plan that did something on this rank."""
    schedule: Schedule
    stepper: Stepper
    training: MicroBatches
    validation: MicroBatches | None
    eval_sequences: int
    """Sequences of one evaluation."""
    token_bytes: Tensor
    """[V] bytes of text each token stands for."""
    model_size: Size
    flops_per_sample: float
    peak: float | None
    """FLOP/s of one device, None when not known."""
    has_weights: bool = True
    """Whether the parameters have their initial weights; otherwise they wait for a checkpoint."""


def device_of(settings: Settings, rank_info: RankInfo) -> torch.device:
    """The device of this process."""
    wanted = settings.run.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("run.device", "this machine has no GPU that torch can use", "Use run.device=cpu.")
    count = torch.cuda.device_count()
    if count >= rank_info.local_world:
        return torch.device("cuda", rank_info.local_rank)
    if count == 1:
        # Each process sees its own GPU only, as number 0: `srun --gpus-per-task=1` binds them so.
        return torch.device("cuda", 0)
    what = f"{rank_info.local_world} processes run on this machine, and {count} GPUs are visible"
    fix = "Start as many processes as there are GPUs, or let each process see one (srun --gpus-per-task=1)."
    raise ConfigError("run.device", what, fix)


def check_machine(settings: Settings, invalid: Collection[str] = ()) -> list[Problem]:
    """List what this machine lacks: the device, and files of the data. Sections in `invalid` are not looked at."""
    problems: list[Problem] = []
    if "run" not in invalid:
        try:
            device = device_of(settings, read_rank_info())
            refused = None if "precision" in invalid else float8.unsupported_device(settings.precision, device)
            dispatch = None if "parallel" in invalid else deepep.unsupported_device(settings.parallel, device)
            problems += [problem for problem in (refused, dispatch) if problem is not None]
        except ConfigError as error:
            problems += error.problems
    problems += [] if "distill" in invalid or "model" in invalid else check_teacher_on_disk(settings)
    return problems if "data" in invalid else problems + missing_files(data_of_run(settings)[0])


def special_tokens_of(tokenizer: Tokenizer) -> SpecialTokens:
    """The ids that objectives need."""
    pieces = enumerate(tokenizer.token_bytes())
    return SpecialTokens(
        tokenizer.vocabulary,
        tokenizer.pad,
        tokenizer.eos,
        tokenizer.mask,
        tokenizer.sentinels,
        tokenizer.bos,
        frozenset(token for token, piece in pieces if piece.rstrip().endswith(b".")),
        tokenizer.fim,
    )


def padding_note(tokenizer: Tokenizer) -> list[str]:
    """Return the line on ids of an existing tokenizer's model that are no token; empty: there are none."""
    if getattr(tokenizer.config, "file", None) is None:
        return []
    ids = tokenizer.vocabulary - sum(tokenizer.piece(token) == UNUSED for token in range(tokenizer.vocabulary))
    padded = tokenizer.vocabulary - ids
    line = f"vocabulary: {tokenizer.vocabulary:,} rows for {ids:,} tokens; no text has the {padded:,} further ones"
    return [line] if padded else []


def set_up(settings: Settings, rank_info: RankInfo, *, resumes: bool = False) -> RunParts:
    """Set up the run. Collective over all ranks. ConfigError for problems that only the data or the machine shows.

    With `resumes` no weights are drawn where there is a checkpoint, which the caller then loads.
    """
    # Rank 0 prepares the data for all, so that it alone looks for files.
    if problems := check_machine(settings, invalid=["data"]):
        raise ConfigError(problems + (check_machine(settings, invalid=["run"]) if rank_info.is_rank0 else []))
    device = device_of(settings, rank_info)
    degrees = axes.resolve(settings.parallel.mesh, rank_info.world)
    seconds, io_seconds = settings.parallel.longest_timeout_seconds, settings.parallel.io_timeout_seconds
    mesh = init_mesh(rank_info, degrees, device, seconds, lambda: check_same_config(settings), io_seconds)
    adopt_tokenizer(settings, mesh)
    corpus = prepare_and_open_data(settings, rank_info, *data_of_run(settings), mesh)
    tokenizer = corpus.tokenizer
    unpadded = _unpadded_vocabulary(settings, mesh, tokenizer)
    specials = replace(special_tokens_of(tokenizer), vocabulary=unpadded)
    length, source_length = settings.data.sequence_length, settings.data.source_length
    model = build_on_meta(settings, tokenizer.vocabulary, unpadded)
    plan = ParallelPlan(settings.parallel, settings.precision, length)
    objective_type = OBJECTIVES.of(settings.objective).part
    problems = plan.check(model, rank_info.world) + objective_type.check(
        settings.objective, specials, source_length, "objective"
    )
    if problems:
        raise ConfigError(problems)
    counted, flops = size(model), training_flops(model, settings.data.target_length, source_length)
    sharding = context.sequence_sharding_of(model, mesh, settings.parallel)
    applied = padding_note(tokenizer)
    draw_weights = not resumes or not _has_checkpoint(settings, mesh)
    model = plan.apply(model, mesh, settings.run.seed, applied.append, draw_weights=draw_weights)
    parameters = sharded_parameters(model)
    objective: Objective = OBJECTIVES.build(settings.objective, specials, source_length, settings.run.seed)
    objective, lines = distil(settings, objective, model, tokenizer, mesh, fresh=draw_weights)
    applied += lines
    engine = make_engine(settings, model, plan, parameters, mesh)
    held_out = corpus.validation
    return RunParts(
        settings=settings,
        mesh=mesh,
        corpus=corpus,
        objective=objective,
        model=model,
        parameters=parameters,
        applied=tuple(applied),
        schedule=SCHEDULES.build(settings.schedule, settings.train.steps),
        stepper=Stepper(engine, objective, device, repeats=degrees.tp * degrees.pp),
        training=make_micro_batches(settings, corpus.train, objective, mesh, sharding),
        validation=None if held_out is None else make_micro_batches(settings, held_out, objective, mesh, sharding),
        eval_sequences=0
        if held_out is None
        else evaluation_sequences(len(held_out.data), settings.train.eval_sequences),
        token_bytes=torch.from_numpy(tokenizer.byte_lengths()).to(device),
        model_size=counted,
        flops_per_sample=flops,
        peak=peak_flops(device, plan.compute),
        has_weights=draw_weights,
    )


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
    settings: Settings, model: nn.Module, plan: ParallelPlan, parameters: list[ShardedParameter], mesh: Mesh
) -> Engine:
    """The engine that owns parameters, gradients and optimizer states."""
    clip, degrees = settings.train.clip_grad_norm, mesh.degrees
    if settings.parallel.zero.engine == "deepspeed":
        from xscale.parallel.engine.deepspeed.engine import DeepSpeedEngine

        def build(flat: Tensor, decays: bool) -> Optimizer:
            optimizer: Optimizer = OPTIMIZERS.build(settings.optimizer, [LocalParameter("", flat, decays)])
            optimizer.kernel_choices = settings.kernels
            return optimizer

        size = settings.train.micro_batch_size
        count = settings.train.batch_size // (size * degrees.dp)
        return DeepSpeedEngine(
            model, mesh, settings.parallel, build, clip_grad_norm=clip, micro_batch=size, micro_batches=count
        )
    # Parameters that no gradient reaches, such as a router's balancing bias, are saved but not optimized.
    trained = [parameter for parameter in parameters if parameter.parameter.requires_grad]
    optimizer: Optimizer = OPTIMIZERS.build(settings.optimizer, optimizer_weights(trained))
    optimizer.kernel_choices = settings.kernels
    optimizer.full_tensors = ShardedTensors([parameter.parameter for parameter in trained])
    decay = settings.train.ema_decay
    return FsdpEngine(
        model,
        plan,
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


def data_of_run(settings: Settings) -> tuple[DataConfig, Tokenizer | None]:
    """The data of the run and its own tokenizer; None for a run that has not begun, or that has none. Not collective.

    A run's tokenizer is in its folder, so a tokenizer file that the config names may be gone.
    """
    run = Path(settings.run.dir)
    begun = newest_on_this_process(run / CHECKPOINTS) is not None
    tokenizer = open_stored_tokenizer(run) if begun else adopted_tokenizer(settings)
    if tokenizer is None:
        return settings.data, None
    return data_with_adopted_tokenizer(settings, tokenizer) or with_tokenizer(settings.data, tokenizer), tokenizer


def prepare_and_open_data(
    settings: Settings,
    rank_info: RankInfo,
    data: DataConfig | None = None,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
) -> Corpus:
    """Open the tokenised data; rank 0 prepares it first where necessary, while the others wait.

    `data`: instead of the settings'. With `tokenizer`, that of the run, none is trained and data of another is refused.
    With a mesh they wait over its background group, whose timeout is meant for that.
    """
    data = settings.data if data is None else data

    def prepare_data() -> None:
        if problems := missing_files(data):
            raise ConfigError(problems)
        prepare(data, tokenizer=tokenizer)

    # Where rank 0 cannot prepare the data, every rank ends with its message.
    ranks = Consensus(None if mesh is None else mesh.background, "prepared", single_process=rank_info.is_single_process)
    ranks.on_rank0(Path(data.folder), prepare_data)
    corpus = open_corpus(data, seed=settings.run.seed)
    name, where = str(settings.objective.kind), f"data in {corpus.sets[0].path}"
    if corpus.records != OBJECTIVES.get(name).traits.records:
        raise ConfigError([records_problem("data", name, where, corpus.records)])
    if corpus.labels is not None and (problems := labels_problems(settings, corpus.labels, where)):
        raise ConfigError(problems)
    if tokenizer is not None:
        require_run_tokenizer(corpus.tokenizer, tokenizer, corpus.sets[0].path)
    return corpus


def evaluation_sequences(available: int, wanted: int | None) -> int:
    """How many sequences an evaluation reads."""
    return available if wanted is None else min(available, wanted)


def make_micro_batches(
    settings: Settings,
    loader: Loader,
    objective: Objective,
    mesh: Mesh,
    sharding: context.SequenceSharding | None = None,
) -> MicroBatches:
    """The micro-batches of this rank over one set of documents."""
    return MicroBatches(
        loader=loader,
        objective=objective,
        micro_batch=settings.train.micro_batch_size,
        ranks=mesh.degrees.dp,
        rank=mesh.data_rank,
        seed=settings.run.seed,
        separate=not settings.data.cross_documents,
        device=mesh.device,
        sequence_sharding=sharding,
        steps=settings.train.steps,
    )
