"""Requirements of samples on the model: documents that are apart, padding, a prefix, labels."""

from collections.abc import Iterable, Iterator

from torch import nn

from xscale.core.choices import Choice
from xscale.core.errors import Problem
from xscale.core.registry import Entry
from xscale.core.requirements import kinds, part_paths, take
from xscale.data.config import DataConfig
from xscale.nn.attention.core import CORES
from xscale.nn.blocks.stack import Stack
from xscale.nn.depth.exits import Exits
from xscale.nn.depth.sequence_pooling import SequencePooling
from xscale.nn.head.class_head import ClassHead
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import MIXERS, Mixer
from xscale.nn.model.embed import global_tokens_of
from xscale.nn.model.model import Model
from xscale.objective.objective import OBJECTIVES, ObjectiveTraits
from xscale.parallel import context
from xscale.parallel.config import ParallelConfig
from xscale.settings.hidden_tokens import (
    FAMILIES,
    parts_that_count_padding,
    parts_without_documents,
)

ObjectiveEntry = Entry[ObjectiveTraits]


def documents_are_apart(
    built_model: nn.Module, model: Model.Config, objective_entry: ObjectiveEntry, data: DataConfig
) -> Iterator[Problem]:
    """The model masks the documents of packed text from each other, or its padding, where either is asked for."""
    traits = objective_entry.traits
    if traits.samples != "packed" or (data.cross_documents and not traits.padded):
        return
    path, hidden = "data.cross_documents", "mask the documents of a sample from each other"
    without = take(True)
    if data.cross_documents:
        path, hidden = "objective", "mask the padding of a sample"
        without = kinds(_without_padding(traits), "objective")
    for family, kind in parts_without_documents(built_model):
        choices = without + _instead(model, family, kind, FAMILIES[family].able(documents=True))
        yield Problem(path, f"{family} '{kind}' cannot {hidden}", choices=choices)
    if count := global_tokens_of(built_model):
        what = f"the {count} global tokens of a sample are shared by its documents, which must not see each other"
        yield Problem(path, what, choices=without + take(0, key="model.global_tokens"))


def padding_is_hidden(
    built_model: nn.Module, model: Model.Config, objective_entry: ObjectiveEntry
) -> Iterator[Problem]:
    """The padding at the end of pairs and of labelled examples is no text. Causal order hides it, or the mixer does."""
    if objective_entry.traits.samples == "packed":
        return
    able = [entry.name for entry in MIXERS if entry.traits.documents or entry.traits.padding]
    mixers = [module for module in built_model.modules() if isinstance(module, Mixer)]
    for kind in sorted({mixer.Config.kind for mixer in mixers if mixer.Config.kind is not None}):
        traits = MIXERS.get(kind).traits
        if traits.bidirectional and kind not in able:
            choices = _instead(model, "mixer", kind, able)
            choices += kinds(_without_padding(objective_entry.traits), "objective")
            yield Problem(
                "objective", f"mixer '{kind}' cannot hide the padding of a sample", choices=choices
            )


def padding_is_not_counted(
    built_model: nn.Module, objective_entry: ObjectiveEntry
) -> Iterator[Problem]:
    """No part compares or averages the tokens of a micro-batch with padding among them."""
    traits = objective_entry.traits
    if traits.samples == "packed" and not traits.padded:
        return
    packed = traits.samples == "packed"
    for name, path in parts_that_count_padding(
        built_model, is_marked=not packed, is_packed=packed
    ).items():
        what = f"in {name} the tokens of a micro-batch compete or are averaged, and padding would be among them"
        fix = "Or take a part whose output for a token depends on its document alone."
        choices = kinds(_without_padding(traits), "objective")
        yield Problem(f"model ({path})", what, fix, choices=choices)


def windows_are_of_the_samples(
    built_model: nn.Module, objective_entry: ObjectiveEntry, data: DataConfig
) -> Iterator[Problem]:
    """A stack that shortens its sequence has windows within a document, and an output wherever a token is predicted."""
    traits = objective_entry.traits
    for path, stack in built_model.named_modules():
        windows = stack.find(SequencePooling) if isinstance(stack, Stack) else None
        if windows is None:
            continue
        pooling = f"model.{path}.pooling"
        if not data.cross_documents and traits.samples == "packed":
            what = (
                f"the windows of {pooling} begin at every second token, wherever a document begins"
            )
            yield Problem(
                "data.cross_documents", what, choices=take(True) + take(None, key=pooling)
            )
        predicts_tokens = traits.labels not in ("class", "score") and windows.repeats
        if predicts_tokens and not windows.config.decoder_blocks:
            what = (
                "the objective predicts at every token, and the tokens of a window have one state"
            )
            choices = take(2) + take(None, key=pooling)
            fix = (
                "More read the full sequence too, and an objective on classes or scores needs none."
            )
            yield Problem(f"{pooling}.decoder_blocks", what, fix, choices=choices)


def prefix_is_seen(
    built_model: nn.Module,
    model: Model.Config,
    objective_entry: ObjectiveEntry,
    parallel: ParallelConfig,
) -> list[Problem]:
    """All tokens of a prefix see each other, for an objective that has one."""
    if not objective_entry.traits.prefix:
        return []
    # A part within a mixer has no kind: the mixer's traits are its own.
    mixers = [
        module
        for module in built_model.modules()
        if isinstance(module, Mixer) and module.Config.kind is not None
    ]
    problems = [_hides_prefix(mixer, model, parallel) for mixer in mixers]
    return list({str(problem): problem for problem in problems if problem is not None}.values())


def _hides_prefix(mixer: Mixer, model: Model.Config, parallel: ParallelConfig) -> Problem | None:
    hidden, kind = "of a prefix would not see its later tokens", str(mixer.Config.kind)
    without = kinds(["causal"], "objective")
    if not MIXERS.get(kind).traits.prefix:
        choices = _instead(model, "mixer", kind, MIXERS.able(prefix=True)) + without
        return Problem("objective", f"in mixer '{kind}' the tokens {hidden}", choices=choices)
    assert isinstance(mixer, Attention), "the trait is of mixers with a core"
    core, position = str(mixer.core.Config.kind), mixer.position
    if not mixer.core.traits.prefix:
        choices = _instead(model, "core", core, CORES.able(prefix=True)) + without
        return Problem("objective", f"in core '{core}' the tokens {hidden}", choices=choices)
    if position is not None and (position.adds_bias or position.adds_scores):
        kind = str(position.Config.kind)
        what = f"position '{kind}' of a causal model tells no distances to later tokens from each other"
        choices = _instead(model, "position", kind, ["rope", "learned", "sinusoidal"]) + without
        return Problem("model.position", what, choices=choices)
    if parallel.mesh.cp > 1 and str(context.style_of(mixer, parallel)) in ("ring", "scan", "halo"):
        what = "a prefix is seen by tokens of earlier shards, whose scores are computed by ulysses alone"
        choices = take("ulysses") + take(1, key="parallel.mesh.cp") + without
        return Problem("parallel.context.style", what, choices=choices)
    return None


def heads_predict_what_labels_tell(built_model: nn.Module) -> Iterator[Problem]:
    """No head predicts tokens beside a head of classes or scores, and exits leave by what such a head predicts."""
    head = getattr(built_model, "head", None)
    for path, module in built_model.named_modules():
        if isinstance(module, Exits):
            scores = isinstance(head, ClassHead) and head.scores
            yield from module.config.check_outputs(
                f"model.{path}", scores=scores, per_example=module.per_example
            )
            if module.second is not None and isinstance(head, ClassHead):
                what = "its head predicts the token after the next, and the objective's labels are of examples"
                yield Problem(f"model.{path}.second_target", what, choices=take(0.0))
    if not isinstance(head, ClassHead):
        return
    fix = "Or an objective on tokens."
    if getattr(built_model, "mtp", None) is not None:
        what = "multi-token prediction predicts tokens, and the objective's labels are classes or scores of examples"
        yield Problem("model.mtp", what, fix, choices=take(None))


def _without_padding(traits: ObjectiveTraits) -> list[str]:
    """Return the objectives without padding that need the same order of a model, or any."""
    return [
        entry.name
        for entry in OBJECTIVES
        if entry.traits.samples == "packed"
        and not entry.traits.padded
        and entry.traits.causal in (traits.causal, None)
        and entry.traits.source == traits.source
    ]


def _instead(
    model: Model.Config, family: str, kind: str, names: Iterable[str]
) -> tuple[Choice, ...]:
    """Return the choices of another part wherever the model's config has one of that kind."""
    return kinds(names, *part_paths(model, family, kind, "model"))


REQUIREMENTS = (
    padding_is_hidden,
    documents_are_apart,
    windows_are_of_the_samples,
    padding_is_not_counted,
    prefix_is_seen,
    heads_predict_what_labels_tell,
)
