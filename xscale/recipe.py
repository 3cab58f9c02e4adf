"""A recipe: the config of one whole run, checked before any process or GPU starts."""

import fnmatch
import importlib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch import nn

from xscale.core.compose import COMMAND_LINE, Composed, compose, leaves
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError, Problem
from xscale.core.foreign import foreign_errors
from xscale.core.yaml_reader import flow_text
from xscale.data.source.source import SOURCES
from xscale.mesh import axes
from xscale.nn.class_head import ClassHead
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.model.model import MODELS
from xscale.nn.module import CHOOSABLE_KERNELS
from xscale.nn.mup import check_mup
from xscale.nn.norm import check_places
from xscale.nn.position.position import POSITIONS
from xscale.objective.objective import OBJECTIVES
from xscale.observe.config import check as check_observers
from xscale.observe.config import check_profile
from xscale.optim.groups import check_groups, nearest_patterns
from xscale.optim.schedule import SCHEDULES
from xscale.parallel.pipeline.check import check_micro_batches
from xscale.parallel.pipeline.schedule import schedule_of
from xscale.parallel.plan import ParallelPlan
from xscale.train.check_model import (
    check_exits,
    check_lora,
    check_multi_token,
    check_prefix,
    check_samples,
    check_two_stage,
)
from xscale.train.check_optimizer import check_averaging, check_mup_optimizer, check_optimizer
from xscale.train.check_sentences import check_sentences
from xscale.train.distill_check import check_distillation
from xscale.train.scored_text import check_tasks
from xscale.train.settings import RECORDS, Settings, build_on_meta, labels_problems, records_problem
from xscale.train.teacher_source import in_train_teacher, teacher_run
from xscale_kernels.packed_attention.op import LIBRARIES as PACKED_LIBRARIES
from xscale_kernels.select import unknown

LISTED = 8
"""At most so many values are listed in a warning."""


class Recipe(Settings):
    """The settings of a run, and their check."""

    def check(self, world: int = 1, invalid: Collection[str] = ()) -> list[Problem]:
        """List every problem on `world` ranks, each with a fix; needs no device and no data.

        What depends on a section in `invalid`, which has its defaults because its values were refused, is not checked.
        """
        problems: list[Problem] = []

        def valid(*sections: str) -> bool:
            return not any(section in invalid for section in sections)

        of_model = self.check_model_config() + self._check_kernels() if valid("model", "data", "kernels") else None
        problems += of_model or []
        if valid("model", "data", "objective"):
            problems += self._check_objective()
        if valid("schedule", "train"):
            schedule = SCHEDULES.of(self.schedule).part
            problems += schedule.check(self.schedule, self.train.steps, "schedule")
        if valid("observe"):
            problems += check_observers(self.observe)
        if valid("observe", "train"):
            problems += check_profile(self.observe.profile, self.train.steps)
        if valid("optimizer", "parallel"):
            problems += check_optimizer(self)
        if valid("optimizer", "parallel", "schedule", "train"):
            problems += check_averaging(self)
        # The vocabulary is unknown before there is a tokenizer; nothing that is checked here depends on its size.
        model = build_on_meta(self, 64) if of_model == [] else None
        if model is not None and valid("optimizer"):
            names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
            problems += check_groups(self.optimizer.groups, names, "optimizer.groups")
            problems += check_two_stage(model, self.optimizer.groups, names)
        if model is not None and self.model.mup is not None and valid("optimizer", "parallel"):
            problems += check_mup(model, self.model, "model") + check_mup_optimizer(self)
        if model is not None and valid("train"):
            problems += self._check_freeze(model)
        traits = OBJECTIVES.of(self.objective).traits if valid("objective") else None
        if model is not None:
            problems += check_samples(model, traits, cross_documents=self.data.cross_documents)
        if model is not None and traits is not None and traits.prefix and valid("parallel"):
            problems += check_prefix(model, self.parallel)
        if model is not None and valid("objective") and isinstance(getattr(model, "head", None), ClassHead):
            problems += check_exits(model)
            problems += check_multi_token(model)
        if model is not None and valid("objective", "train"):
            problems += check_tasks(self, model)
        if valid("parallel", "precision"):
            problems += ParallelPlan(self.parallel, self.precision, self.data.sequence_length).check(model, world)
        if valid("distill", "model", "parallel"):
            problems += check_distillation(self, model, world) + self._check_teacher_run(world)
        fitting = axes.checkable_world(self.parallel.mesh, world)
        if valid("parallel", "train") and fitting is not None:
            dp = axes.resolve(self.parallel.mesh, fitting).dp
            micro_batches = self.train.batch_size // (self.train.micro_batch_size * dp)
            problems += _check_batch(self, dp) or check_micro_batches(self.parallel, micro_batches, "parallel")
        return problems

    def warnings(self) -> list[Problem]:
        """List values that are possible and seldom meant."""
        problems: list[Problem] = []
        steps, warmup = self.train.steps, self.schedule.warmup_steps
        if warmup >= steps > 1:
            what = f"the warm-up of {warmup} steps is not shorter than train.steps={steps}: the rate only rises"
            problems.append(Problem("schedule.warmup_steps", what, f"Take at most {steps - 1}, or train for longer."))
        problems += _unused_position(self)
        if self.optimizer.lr == 0:
            problems.append(Problem("optimizer.lr", "the learning rate is 0: no weight changes"))
        return problems

    def _check_teacher_run(self, world: int) -> list[Problem]:
        """Check the run that trains the teacher first, if there is one."""
        try:
            teacher = teacher_run(self)
        except ConfigError as error:
            return list(error.problems)
        return [] if teacher is None else [in_train_teacher(problem) for problem in Recipe.check(teacher, world)]  # type: ignore[arg-type]

    def _check_freeze(self, model: nn.Module) -> list[Problem]:
        """List patterns of frozen parameters that match none, and what cannot train with frozen ones."""
        names, path, problems = [name for name, _ in model.named_parameters()], "train.freeze", list[Problem]()
        for index, pattern in enumerate(self.train.freeze):
            if not fnmatch.filter(names, pattern):
                fix = f"The nearest are {', '.join(nearest_patterns(pattern, names))}."
                what = f"no parameter has a name that matches '{pattern}'"
                problems.append(Problem(f"{path}.{index}", what, fix))
        unadapted = [] if self.lora is None else check_lora(model, self.lora, self.parallel.mesh)
        # LoRA that is added to no map leaves nothing to train, which is no fault of the patterns of frozen parameters.
        if not unadapted and not any(parameter.requires_grad for parameter in model.parameters()):
            problems.append(Problem(path, "freezes all parameters", "Leave out the pattern of those to be trained."))
        if self.init.from_ is not None and self.parallel.zero.engine == "deepspeed":
            what = "DeepSpeed keeps the parameters in tensors of its own, into which no other weights are read"
            problems.append(Problem("init.from", what, "Take parallel.zero.engine=torch."))
        problems += unadapted
        splits = self.parallel.mesh.pp > 1 and schedule_of(self.parallel.pipeline).splits_backward
        if (self.train.freeze or self.lora is not None) and splits:
            kind = self.parallel.pipeline.schedule
            what = f"the schedule {kind} computes the gradients of a stage's weights by themselves, and some are frozen"
            problems.append(Problem("parallel.pipeline.schedule", what, "Take 1f1b, gpipe or interleaved_1f1b."))
        if (self.train.freeze or self.lora is not None) and self.parallel.zero.engine == "deepspeed":
            what = "DeepSpeed flattens parameters into one tensor, which is trained as a whole"
            fix = "Leave it empty and lora null, or take parallel.zero.engine=torch."
            problems.append(Problem(path, what, fix))
        return problems

    def _check_kernels(self) -> list[Problem]:
        faults = unknown(self.kernels)
        for operator in self.kernels.keys() - faults.keys() - set(CHOOSABLE_KERNELS):
            what = f"the implementation of '{operator}' cannot be chosen here"
            faults[operator] = (what, f"These can: {', '.join(CHOOSABLE_KERNELS)}.")
        named = self.kernels.get("packed_attention")
        if named in PACKED_LIBRARIES and self.parallel.compile:
            what = f"torch.compile would compile '{named}' anew for each number of documents"
            faults["packed_attention"] = (
                what,
                "Leave it out, which takes FlexAttention, or take parallel.compile=false.",
            )
        return [Problem(f"kernels.{operator}", what, fix) for operator, (what, fix) in faults.items()]

    def check_model_config(self) -> list[Problem]:
        entry = MODELS.of(self.model)
        problems: list[Problem] = entry.part.check(self.model, (64, self.data.sequence_length), "model")
        return problems + check_places(self.model, "model")

    def _check_objective(self) -> list[Problem]:
        model, objective = MODELS.of(self.model), OBJECTIVES.of(self.objective)
        problems = list(objective.part.check(self.objective, None, self.data.source_length, "objective"))
        able, needs = model.traits, objective.traits
        if needs.causal not in (None, able.causal) or able.source != needs.source:
            kind = "reads a source sequence" if needs.source else "reads one sequence"
            side = {True: " and is causal", False: " and is bidirectional", None: ""}[needs.causal]
            what = f"'{objective.name}' needs a model that {kind}{side}; '{model.name}' is not one"
            sides = {} if needs.causal is None else {"causal": needs.causal}
            models = ", ".join(MODELS.able(source=needs.source, **sides))
            either = OBJECTIVES.able(causal=None, source=able.source)
            objectives = ", ".join(sorted([*OBJECTIVES.able(causal=able.causal, source=able.source), *either]))
            fix = f"It goes with {models}; '{model.name}' goes with {objectives}."
            problems.append(Problem("objective", what, fix))
        problems += objective.part.check_model(self.objective, causal=able.causal, path="objective")
        return problems + self._check_samples() + check_sentences(self)

    def _check_samples(self) -> list[Problem]:
        """List where the objective and the data differ in what samples are."""
        objective, data, problems = OBJECTIVES.of(self.objective), self.data, list[Problem]()
        source = SOURCES.of(data.source)
        if data.prepared is None and not data.blend:
            where, labels = f"source '{source.name}'", source.part.labels(data.source)
            if source.traits.records != objective.traits.records:
                problems.append(records_problem("data.source", objective.name, where, source.traits.records))
            elif labels is not None:
                problems += labels_problems(self, labels, where)
        for key in ("max_source_length", "max_target_length"):
            length, path = getattr(data, key), f"data.{key}"
            if length is not None and objective.traits.samples != "pairs":
                what = f"objective '{objective.name}' reads one text, of which data.sequence_length is the length"
                problems.append(Problem(path, what, "Leave it out."))
            elif length is not None and length > data.sequence_length:
                what = f"{length} exceeds data.sequence_length={data.sequence_length}, the longest that the model takes"
                problems.append(Problem(path, what, f"Take at most {data.sequence_length}, or a longer one there."))
        if self.train.bleu_pairs and objective.traits.samples != "pairs":
            what = f"objective '{objective.name}' has no pairs of a source and a target"
            problems.append(Problem("train.bleu_pairs", what, "Take 0, or objective.kind=seq2seq."))
        if objective.traits.samples in ("packed", "sentences"):
            return problems
        if data.cross_documents:
            what = f"'{objective.name}' hides padding as a document of its own"
            problems.append(Problem("data.cross_documents", what, "Take false."))
        if data.source_length < 2:
            what = "a source needs two tokens, one of text and one that ends it"
            problems.append(Problem("data.sequence_length", what, "Take at least 2."))
        if objective.traits.samples == "labels" and data.sequence_length < 5:
            what = "two texts need five tokens: one that begins them, and each one of text and one that ends it"
            problems.append(Problem("data.sequence_length", what, "Take at least 5."))
        if "data.sequence_length" in self.run.allow_changed:
            what = f"{RECORDS[objective.traits.records]} are not split anew by another length: each stays a sample"
            problems.append(Problem("run.allow_changed", what, "Leave data.sequence_length out of it."))
        return problems


def _unused_position(settings: Settings) -> list[Problem]:
    """Warn of a position encoding inside attention in a model of which no layer has any."""
    model: Any = settings.model
    position = model.position
    stacks = [getattr(model, name) for name in ("stack", "encoder", "decoder") if hasattr(model, name)]
    mixers = [mixer for stack in stacks for mixer in stack.mixers()]
    if POSITIONS.of(position).traits.where in ("none", "input") or any(
        MIXERS.of(mixer).part.uses_position for mixer in mixers
    ):
        return []
    kinds = ", ".join(dict.fromkeys(f"'{mixer.kind}'" for mixer in mixers))
    what = f"'{position.kind}' acts inside attention, and the model has none ({kinds}): it has no effect"
    return [Problem("model.position", what, "Take one that acts on the embeddings: learned or sinusoidal; or none.")]


def _check_batch(settings: Settings, dp: int) -> list[Problem]:
    """Whether micro_batch_size x dp divides the batch size (gradient accumulation takes whole micro-batches)."""
    batch, micro = settings.train.batch_size, settings.train.micro_batch_size
    if batch % (micro * dp) == 0:
        return []
    fits = [size for size in range(1, batch + 1) if batch % (size * dp) == 0]
    what = f"micro_batch_size={micro} x dp={dp} does not divide batch_size={batch}"
    fix = (
        f"Take micro_batch_size among {', '.join(map(str, fits))}." if fits else f"Take a batch_size that {dp} divides."
    )
    return [Problem("train.batch_size", what, fix)]


def read(file: Path, overrides: list[str]) -> tuple[Recipe, Composed]:
    """Compose and validate a config; a ConfigError lists every problem. Plugins are imported first."""
    composed = compose(file, overrides)
    return decode_recipe(composed), composed


def decode_recipe(composed: Composed) -> Recipe:
    """Validate a composed config; a ConfigError lists every problem. Plugins are imported first."""
    if problems := _import_plugins(composed.data):
        raise ConfigError(problems)
    return decode(Recipe, composed.data, composed.origin)


def dropped_values(recipe: Recipe, composed: Composed) -> list[Problem]:
    """List the overrides of a kind that drop values of the files for which the new part has a key too."""
    current, origin = encode(recipe), composed.origin
    problems = []
    for path, old in composed.replaced.items():
        lost = [
            f"{key}={flow_text(value)}"
            for key, value in leaves(old, path)
            if key != f"{path}.kind" and origin.get(key) != COMMAND_LINE and _changed(current, key, value)
        ]
        if lost:
            values = ", ".join(lost[:LISTED]) + (f" and {len(lost) - LISTED} more" if len(lost) > LISTED else "")
            what = f"another kind replaces the whole section, so that these values are dropped: {values}"
            problems.append(Problem(f"{path}.kind", what, "Give those that you want to keep, as overrides."))
    return problems


def _changed(data: Any, path: str, value: Any) -> bool:
    """Whether `data` has a key at the dotted path, with another value."""
    for name in path.split("."):
        if isinstance(data, list) and name.isdigit() and int(name) < len(data):
            data = data[int(name)]
            continue
        if not isinstance(data, dict) or name not in data:
            return False
        data = data[name]
    return bool(data != value and not (isinstance(data, dict) and data.get("kind") == value))


def read_and_check(
    composed: Composed,
    world: int | None = None,
    check_machine: Callable[[Recipe, Collection[str]], list[Problem]] | None = None,
) -> tuple[Recipe, int]:
    """Validate a config and check it on `world` ranks (None: the fewest that fit); a ConfigError lists all problems.

    These are the overrides that cannot be read, the values that are refused, what `Recipe.check` finds in the other
    sections, and what `check_machine` returns: it gets the recipe and the sections whose values were refused. With
    several ranks it is asked only if there are other problems, because each rank must come to the same result.
    """
    problems = [*composed.problems, *_import_plugins(composed.data)]
    if len(problems) > len(composed.problems):
        # Parts of a missing plugin would look like misspelt ones.
        raise ConfigError(problems)
    invalid: frozenset[str] = frozenset()
    try:
        recipe = decode(Recipe, composed.data, composed.origin)
    except ConfigError as error:
        problems += error.problems
        invalid = frozenset(re.split(r"[. ]", problem.path)[0] for problem in error.problems)
        valid = {key: value for key, value in composed.data.items() if key not in invalid}
        try:
            recipe = decode(Recipe, valid, composed.origin)
        except ConfigError:
            # There are more problems than are listed, so that some of the other sections have one too.
            raise ConfigError(problems) from None
    if world is None:
        world = axes.min_world_size(recipe.parallel.mesh)
    problems += recipe.check(world, invalid)
    if check_machine is not None and (problems or world == 1):
        problems += check_machine(recipe, invalid)
    if problems:
        raise ConfigError(problems)
    return recipe, world


def _import_plugins(data: dict[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    for plugin in _plugins(data):
        try:
            with foreign_errors("plugins", f"'{plugin}' cannot be imported", "Is it installed?"):
                importlib.import_module(plugin)
        except ConfigError as error:
            problems += error.problems
    return problems


def _plugins(data: dict[str, Any]) -> list[str]:
    plugins = data.get("plugins", [])
    return [name for name in plugins if isinstance(name, str)] if isinstance(plugins, list | tuple) else []
