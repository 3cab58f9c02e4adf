"""Every section of a run's config."""

from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Literal

import pydantic
import torch
from torch import nn

from xscale.checkpoint.config import CheckpointConfig
from xscale.core.config import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Slot,
)
from xscale.core.errors import ConfigError, Problem
from xscale.core.foreign import reason
from xscale.core.paths import PathText
from xscale.core.requirements import kinds, take
from xscale.data.config import DataConfig
from xscale.data.source.source import SOURCES, Labels
from xscale.nn.adapt.lora import LoraConfig, add_lora
from xscale.nn.adapt.mup import apply_mup
from xscale.nn.blocks.stack import Stack
from xscale.nn.head.class_head import ClassHead
from xscale.nn.head.distillation import DistillConfig, add_width_maps
from xscale.nn.head.head import hide_padding
from xscale.nn.init import Init
from xscale.nn.model.decoder import Decoder
from xscale.nn.model.embed import global_tokens_of
from xscale.nn.model.model import MODELS, Model
from xscale.nn.module import choose_kernels, name_modules, substitute
from xscale.objective.objective import OBJECTIVES, Causal, HeadSizes, Objective
from xscale.observe.config import ObserveConfig
from xscale.optim.optimizer.adamw import AdamW
from xscale.optim.optimizer.optimizer import OPTIMIZERS, Optimizer
from xscale.optim.schedule import SCHEDULES, Cosine, Schedule
from xscale.parallel.config import ParallelConfig, PrecisionConfig


class About(Config):
    """Description of the variant in a recipe of `configs/xformer`; training keeps it as data."""

    id: str
    """Name in the catalogue of Transformer variants; the recipe is `configs/xformer/<id>.yaml`."""
    name: str
    """Name in the literature."""
    category: Literal[
        "mode",
        "attention",
        "attention-prior",
        "multi-head",
        "position",
        "norm",
        "ffn",
        "moe",
        "architecture",
        "recurrence",
        "adaptive-compute",
        "pretraining-objective",
        "efficiency-other",
    ]
    """Kind of variant: what it changes in the model or in its training."""
    paper: str
    """Authors, year and title of the paper."""
    year: int = pydantic.Field(ge=1950)
    """Year of the paper."""
    summary: str
    """One sentence on the mechanism."""
    why: str = ""
    """The part of the paper's mechanism that the recipe lacks, for which the variant is listed as `partly`; empty: it
    is listed as `works`."""
    deviations: tuple[str, ...] = ()
    """Sentences on where the recipe differs from the paper, besides the deviations of its parts."""


class RunConfig(Config):
    renamed = {"changed": "allow_changed"}

    dir: PathText = "runs/default"
    """Folder of everything the run writes; starting again with the same folder resumes the run."""
    seed: NonNegativeInt = 0
    """Seed of initial weights, data order, dropout and router noise."""
    fresh: bool = False
    """Refuse to resume from a checkpoint that is already in the folder."""
    allow_changed: tuple[Literal["train.batch_size", "data.sequence_length"], ...] = ()
    """Keys whose values may differ from those the run was started with. With another batch size the order of samples
    stays; with another sequence length the text is split anew, and the run resumes after as many tokens, in a new
    random order."""
    allow_links: tuple[Literal["checkpoints", "tensorboard", "profile", "wandb"], ...] = ()
    """Folders in the run folder that may be symbolic links to folders elsewhere, such as checkpoints on a scratch file
    system. Any other link in a run folder is refused, because the run would write where it points."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu, cuda, or auto: a GPU when there is one."""


class InitConfig(Config):
    from_: PathText | None = pydantic.Field(default=None, alias="from")
    """Run, checkpoint or folder of Hugging Face's transformers with the initial weights, for fine-tuning; parameters of
    the head that it lacks are drawn from the seed. It is read before the first step only: a run that resumes does not
    need it. null: all weights are drawn."""


class SampleConfig(Config):
    prompts: tuple[str, ...] = ()
    """Prompts to generate from at the end of a run (models that can generate)."""
    tokens: PositiveInt = 128
    """Most tokens to generate for a prompt."""
    temperature: NonNegativeFloat = 0.8
    """Divisor of the logits; 0 takes the most likely token."""
    top_k: PositiveInt | None = 40
    """Sample among the k most likely tokens only; null: all."""


class TasksConfig(Config):
    names: tuple[str, ...] = ()
    """Tasks of lm_eval, such as hellaswag, that the model is evaluated on during the run; needs the extra `eval`.
    Empty: none."""
    every_steps: PositiveInt = 1000
    """Steps between evaluations of the tasks; one more follows the last step."""
    limit: PositiveInt | None = None
    """Examples of each task; null: all."""
    shots: NonNegativeInt | None = None
    """Examples before each question; null: as many as the task says, or none."""
    folder: PathText | None = None
    """Folder of further tasks, as YAML files of lm_eval, which rank 0 reads; null: the library's alone."""


class SpikeConfig(Config):
    policy: Literal["none", "skip", "rollback", "stop"] = "none"
    """Action on a loss spike. none: update as usual. skip: discard the update. rollback: restore the last good
    checkpoint and skip the data since then. stop: end the run."""
    window: int = pydantic.Field(default=100, ge=4)
    """How many losses before a step its loss is compared with; there are no spikes until half of them are known."""
    deviations: PositiveFloat = 8.0
    """A spike exceeds their median by more than this many median absolute deviations (8: about 5 standard ones) ..."""
    floor: NonNegativeFloat = 0.05
    """... and by more than this fraction of the median."""


class TrainConfig(Config):
    renamed = {"clip": "clip_grad_norm"}

    steps: PositiveInt = 1000
    """Optimizer steps of the whole run."""
    stop_after: PositiveInt | None = None
    """Save and exit after this many steps of this process, as on a signal; null: train to the last step."""
    batch_size: PositiveInt = 16
    """Sequences in one optimizer step, over all ranks."""
    micro_batch_size: PositiveInt = 4
    """Sequences in one forward of one rank; expert capacity and auxiliary losses apply to a micro-batch."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Greatest norm of the gradient of all parameters, to which it is scaled down; null: no clipping. Parameters of an
    `optimizer.groups` with a `clip_grad_norm` are clipped by that, apart from the others."""
    ema_decay: float | None = pydantic.Field(default=None, gt=0, lt=1)
    """Decay of an exponential moving average of the trained weights, such as 0.999: after each update
    ema = decay * ema + (1 - decay) * weights. It is saved as `ema.<parameter>` and evaluated beside the weights; null:
    none."""
    nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    """Action on a step whose loss or gradient is not finite; see spike.policy."""
    spike: SpikeConfig = SpikeConfig()
    """Policy for loss spikes."""
    skip_limit: NonNegativeInt = 10
    """Most steps skipped in a row; one more ends the run."""
    rollback_limit: PositiveInt = 3
    """Most rollbacks to the same checkpoint; one more ends the run."""
    freeze: tuple[str, ...] = ()
    """Patterns of full parameter names that are not trained, such as `embed.*`: * any characters, ? one. They have no
    optimizer states."""
    eval_every: NonNegativeInt = 100
    """Steps between evaluations on the validation documents; one more follows the last step. 0: no evaluations."""
    eval_sequences: PositiveInt | None = 64
    """Sequences of an evaluation; null: all."""
    gc_every_steps: NonNegativeInt = 50
    """Steps between collections of Python's cyclic garbage, by all ranks after the same step. 0: Python decides when,
    on each rank for itself, and the other ranks wait."""
    baseline: bool = True
    """Compute bits per byte of an order-2 byte model (of the first 256 MB of text) at the end, for comparison."""
    bleu_pairs: NonNegativeInt = 0
    """Validation pairs whose targets a run on pairs writes at the end; it prints their BLEU (by sacrebleu), beside that
    of the sources as they stand. 0: none."""
    sample: SampleConfig = SampleConfig()
    """Text generated at the end."""
    tasks: TasksConfig = TasksConfig()
    """Tasks that the model is evaluated on during the run."""


class Settings(Config):
    """One run."""

    about: About | None = None
    """The variant of the catalogue that this is; an ordinary run has none."""
    run: RunConfig = RunConfig()
    """Folder and seed of the run."""
    plugins: tuple[str, ...] = ()
    """Python modules to import first; they may register parts."""
    model: Annotated[Model.Config, Slot(MODELS)] = Decoder.Config()
    """The model."""
    init: InitConfig = InitConfig()
    """Initial weights."""
    lora: LoraConfig | None = None
    """LoRA: narrow trained matrices beside frozen ones, for fine-tuning; null: none."""
    objective: Annotated[Objective.Config, Slot(OBJECTIVES)] = Causal.Config()
    """The training objective."""
    distill: DistillConfig | None = None
    """Knowledge distillation: the model is a student, which learns from a teacher too; null: there is no teacher."""
    data: DataConfig = DataConfig()
    """The training text."""
    train: TrainConfig = TrainConfig()
    """The training loop."""
    optimizer: Annotated[Optimizer.Config, Slot(OPTIMIZERS)] = AdamW.Config()
    """The optimizer."""
    schedule: Annotated[Schedule.Config, Slot(SCHEDULES)] = Cosine.Config()
    """The learning-rate schedule."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    parallel: ParallelConfig = ParallelConfig()
    """Parallelism and sharding."""
    kernels: dict[str, str] = {}
    """Operator -> implementation, such as `rmsnorm: triton`; operators not named use the first usable one."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpointing."""
    observe: ObserveConfig = ObserveConfig()
    """Logs and reports."""

    @property
    def has_pairs(self) -> bool:
        """Whether samples are pairs of a source and a target."""
        return bool(OBJECTIVES.of(self.objective).traits.samples == "pairs")

    @property
    def has_sentences(self) -> bool:
        """Whether samples are consecutive text in two halves and text of another document."""
        return bool(OBJECTIVES.of(self.objective).traits.samples == "sentences")

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample that the model reads, with those that pad a pair."""
        data = self.data
        return data.source_length + data.target_length if self.has_pairs else data.sequence_length


RECORDS = {
    "text": "texts",
    "pairs": "pairs of a source and a target",
    "labels": "labelled examples",
}
"""Content of documents -> how messages call them."""


def records_problem(path: str, objective: str, data: str, records: str) -> Problem:
    """Return the problem at `path` of an objective of that name, which reads other documents than the `records` of
    `data`."""
    wanted = OBJECTIVES.get(objective).traits.records
    objectives = [entry.name for entry in OBJECTIVES if entry.traits.records == records]
    what = f"the documents of the {data} are {RECORDS[records]}, and '{objective}' reads {RECORDS[wanted]}"
    choices = kinds(SOURCES.able(records=wanted), "data.source") + kinds(objectives, "objective")
    return Problem(path, what, choices=choices)


def labels_problems(settings: Settings, labels: Labels, data: str) -> list[Problem]:
    """List where the objective and the labels of `data`, examples that it reads, differ in kind or number."""
    config, entry = settings.objective, OBJECTIVES.of(settings.objective)
    if labels.kind != entry.traits.labels:
        differ = f"of the kind '{labels.kind}', and '{entry.name}' reads '{entry.traits.labels}'"
        what = f"the labels of the {data} are {differ}"
        choices = kinds(OBJECTIVES.able(labels=labels.kind), "objective")
        choices += take(entry.traits.labels, key="data.source.labels")
        return [Problem("objective", what, choices=choices)]
    classes = getattr(config, "classes", None)
    if classes is not None and classes != len(labels.names):
        what = f"is {classes}, and the {data} has {len(labels.names)} classes: {', '.join(labels.names)}"
        return [Problem("objective.classes", what, choices=take(len(labels.names)))]
    return []


def build_on_meta(
    settings: Settings, vocabulary: int, unpadded_vocabulary: int | None = None
) -> nn.Module:
    """The full model without storage, on torch's meta device; ConfigError for sizes that torch cannot count.

    `unpadded_vocabulary`: rows of the vocabulary that are tokens, to which alone the model gives a probability; None:
    all.
    """
    try:
        model = _build_on_meta(settings, vocabulary)
        hide_padding(model, vocabulary, unpadded_vocabulary or vocabulary)
        return model
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ConfigError(
            "model", f"its sizes are none that torch can count: {reason(error)}"
        ) from None


def _build_on_meta(settings: Settings, vocabulary: int) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = MODELS.build(settings.model, vocabulary, settings.data.sequence_length)
        if settings.distill is not None:
            add_width_maps(model, settings.distill, settings.model.width, settings.model.init_std)
        head = OBJECTIVES.of(settings.objective).part.head_sizes(settings.objective)
        if head is not None:
            put_class_head(model, settings.model, head)
        if settings.model.mup is not None:
            apply_mup(model, settings.model.mup, settings.model.width, settings.model.init_std)
        if settings.lora is not None:
            add_lora(model, settings.lora)
        for name, parameter in model.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in settings.train.freeze):
                parameter.requires_grad_(False)
    choose_kernels(model, settings.kernels)
    return model


def put_class_head(model: nn.Module, config: Model.Config, sizes: HeadSizes) -> None:
    """Put heads of an objective on labels in place of the language-model heads of a model on meta."""
    make_head = partial(
        ClassHead,
        config.width,
        sizes.outputs,
        Init(std=config.init_std),
        scores=sizes.scores,
        dense=sizes.dense,
        activation=sizes.activation,
        per_example=sizes.per_example,
        globals=global_tokens_of(model),
    )
    substitute(model, "head", make_head())
    for stack in [module for module in model.modules() if isinstance(module, Stack)]:
        for part in stack.passes():
            part.replace_heads(make_head)
    name_modules(model)
