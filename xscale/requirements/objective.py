"""Requirements of an objective on the model, and on the kind of data that it is trained on."""

from collections.abc import Iterator
from typing import Any

from xscale.core.errors import Problem
from xscale.core.registry import Entry
from xscale.core.requirements import UNKNOWN, at_least, change, kinds, reads, take
from xscale.data.config import DataConfig
from xscale.data.source.source import SOURCES, Labels, SourceTraits
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.model.model import MODELS, Model, ModelTraits
from xscale.nn.residual.residual_stream import RESIDUALS
from xscale.objective.objective import OBJECTIVES, Objective, ObjectiveTraits
from xscale.parallel.config import ParallelConfig
from xscale.settings.settings import RECORDS, RunConfig, Settings, TrainConfig

ObjectiveEntry = Entry[ObjectiveTraits]


def objective_fits_itself(objective: Objective.Config, data: DataConfig) -> list[Problem]:
    """The objective can make samples of this length."""
    problems: list[Problem] = OBJECTIVES.of(objective).part.check(
        objective, None, data.source_length, "objective"
    )
    return problems


def objective_goes_with_model(
    objective_entry: ObjectiveEntry, model_entry: Entry[ModelTraits]
) -> Iterator[Problem]:
    """The model has the order and the source that the objective needs."""
    able, needs = model_entry.traits, objective_entry.traits
    if needs.causal in (None, able.causal) and able.source == needs.source:
        return
    kind = "reads a source sequence" if needs.source else "reads one sequence"
    side = {True: " and is causal", False: " and is bidirectional", None: ""}[needs.causal]
    what = (
        f"'{objective_entry.name}' needs a model that {kind}{side}; '{model_entry.name}' is not one"
    )
    sides = {} if needs.causal is None else {"causal": needs.causal}
    models = MODELS.able(source=needs.source, **sides)
    objectives = OBJECTIVES.able(causal=able.causal, source=able.source)
    objectives += OBJECTIVES.able(causal=None, source=able.source)
    yield Problem(
        "objective", what, choices=kinds(models, "model") + kinds(sorted(objectives), "objective")
    )


def texts_with_versions_have_choices(
    objective_entry: ObjectiveEntry, data: DataConfig
) -> Iterator[Problem]:
    """What `data.dupe_factor` repeats is drawn by the objective and the sample, by the number of a text."""
    if data.dupe_factor is None or (objective_entry.traits.random and not data.from_caller):
        return
    what = f"'{objective_entry.name}' makes no random choices that texts could have in versions"
    if data.from_caller:
        what = "the caller's samples have numbers, and no texts that come again"
    yield Problem("data.dupe_factor", what, choices=take(None))


def objective_reads_the_right_token(
    objective: Objective.Config, model_entry: Entry[ModelTraits]
) -> list[Problem]:
    """The objective predicts at a token that has read all others."""
    part = OBJECTIVES.of(objective).part
    problems: list[Problem] = part.check_model(
        objective, causal=model_entry.traits.causal, path="objective"
    )
    return problems


@reads("data", "parallel", "distill")
def objective_needs_are_met(settings: Settings, objective: Objective.Config) -> Iterator[Problem]:
    """The recipe has what the objective states in `Objective.needs`."""
    for need in OBJECTIVES.of(objective).part.needs(objective):
        yield from need.problems(settings, "objective")


def source_entry(data: DataConfig) -> Entry[SourceTraits] | object:
    """Return the registered source; unknown where the documents are prepared ones, whose kind is on a disk."""
    return UNKNOWN if data.prepared is not None or data.blend else SOURCES.of(data.source)


def documents_are_of_the_objective(
    source_entry: Entry[SourceTraits], objective_entry: ObjectiveEntry
) -> Iterator[Problem]:
    """The documents of the source are what the objective reads: texts, pairs or labelled examples."""
    records, wanted = source_entry.traits.records, objective_entry.traits.records
    if records == wanted:
        return
    what = f"the documents of the source '{source_entry.name}' are {RECORDS[records]}, and "
    what += f"'{objective_entry.name}' reads {RECORDS[wanted]}"
    objectives = [other.name for other in OBJECTIVES if other.traits.records == records]
    choices = kinds(SOURCES.able(records=wanted), "data.source") + kinds(objectives, "objective")
    yield Problem("data.source", what, choices=choices)


def labels(
    source_entry: Entry[SourceTraits],
    data: DataConfig,
    documents_are_of_the_objective: tuple[Problem, ...],
) -> Labels | object:
    """Return the labels of the source's examples; unknown where they are in its files, or where there are none."""
    known = None if documents_are_of_the_objective else source_entry.part.labels(data.source)
    return UNKNOWN if known is None else known


def labels_are_of_the_objective(
    labels: Labels, source_entry: Entry[SourceTraits], objective_entry: ObjectiveEntry
) -> Iterator[Problem]:
    """The labels are classes, scores or tags, as the objective reads them."""
    wanted = objective_entry.traits.labels
    if labels.kind == wanted:
        return
    what = f"the labels of the source '{source_entry.name}' are of the kind '{labels.kind}', and "
    what += f"'{objective_entry.name}' reads '{wanted}'"
    choices = kinds(OBJECTIVES.able(labels=labels.kind), "objective") + take(
        wanted, key="data.source.labels"
    )
    yield Problem("objective", what, choices=choices)


def classes_are_those_of_the_data(
    labels: Labels, source_entry: Entry[SourceTraits], objective: Objective.Config
) -> Iterator[Problem]:
    """The objective has as many classes as the labels."""
    classes = getattr(objective, "classes", None)
    if classes is not None and classes != len(labels.names):
        count = f"{len(labels.names)} classes: {', '.join(labels.names)}"
        what = f"is {classes}, and the source '{source_entry.name}' has {count}"
        yield Problem("objective.classes", what, choices=take(len(labels.names)))


def lengths_are_of_pairs(data: DataConfig, objective_entry: ObjectiveEntry) -> Iterator[Problem]:
    """Lengths of a source and a target are given for pairs alone, and are at most the model's."""
    for key in ("max_source_length", "max_target_length"):
        length, path = getattr(data, key), f"data.{key}"
        if length is None:
            continue
        if objective_entry.traits.samples != "pairs":
            what = f"objective '{objective_entry.name}' reads one text, of which data.sequence_length is the length"
            yield Problem(path, what, choices=take(None))
        elif length > data.sequence_length:
            what = f"{length} exceeds data.sequence_length={data.sequence_length}, the longest that the model takes"
            choices = take(data.sequence_length) + take(length, key="data.sequence_length")
            yield Problem(path, what, choices=choices)


def bleu_is_of_pairs(train: TrainConfig, objective_entry: ObjectiveEntry) -> Iterator[Problem]:
    """Only a run on pairs has targets to compare with."""
    if train.bleu_pairs and objective_entry.traits.samples != "pairs":
        what = f"objective '{objective_entry.name}' has no pairs of a source and a target"
        yield Problem("train.bleu_pairs", what, choices=take(0) + kinds(["seq2seq"], "objective"))


def samples_have_their_tokens(
    data: DataConfig, objective_entry: ObjectiveEntry
) -> Iterator[Problem]:
    """A sample has room for a token of each of its texts, and for those that begin and end them."""
    samples, path = objective_entry.traits.samples, "data.sequence_length"
    if samples == "sentences" and data.sequence_length < 5:
        what = "two texts of a token each, [CLS] and two [SEP] are five tokens"
        yield at_least(path, what, 5)
    elif samples in ("pairs", "labels") and data.source_length < 2:
        what = "a source needs two tokens, one of text and one that ends it"
        yield at_least(path, what, 2)
    elif samples == "labels" and data.sequence_length < 5:
        what = "two texts need five tokens: one that begins them, and each one of text and one that ends it"
        yield at_least(path, what, 5)


def only_packed_text_is_split_anew(
    run: RunConfig, objective_entry: ObjectiveEntry
) -> Iterator[Problem]:
    """A run that resumes with another sequence length has other samples, unless they are packed text."""
    samples, key = objective_entry.traits.samples, "data.sequence_length"
    if samples == "packed" or key not in run.allow_changed:
        return
    what = f"{RECORDS[objective_entry.traits.records]} are not split anew by another length: each stays a sample"
    if samples == "sentences":
        what = "the text of another length is split into other samples, so that the run could not resume in its place"
    yield Problem(
        "run.allow_changed", what, choices=take([name for name in run.allow_changed if name != key])
    )


def text_is_split_for_sentences(
    data: DataConfig, objective_entry: ObjectiveEntry
) -> Iterator[Problem]:
    """Text is split into sentences where the objective reads them, and only there."""
    wanted = objective_entry.traits.samples == "sentences"
    if data.split_sentences == wanted:
        return
    what = f"objective '{objective_entry.name}' reads no sentences"
    if wanted:
        what = f"objective '{objective_entry.name}' reads sentences, and the text is not split into them"
    objectives = OBJECTIVES.able(samples="packed" if wanted else "sentences")
    yield Problem(
        "data.split_sentences", what, choices=take(wanted) + kinds(objectives, "objective")
    )


def sentences_have_global_tokens(
    data: DataConfig, model: Model.Config, objective: Objective.Config
) -> Iterator[Problem]:
    """The model has a global token for each sentence of a sample that the objective contrasts."""
    entry = OBJECTIVES.of(objective)
    count, tokens = (
        entry.part.sentences(objective, data.sequence_length),
        getattr(model, "global_tokens", 0),
    )
    if count is not None and tokens < count:
        what = f"'{entry.name}' needs a global token for each of {count} sentences, and the model has {tokens}"
        yield Problem("model.global_tokens", what, choices=_of_encoder(("", count)))


def stages_can_run_it_twice(
    model: Model.Config, objective: Objective.Config, data: DataConfig, parallel: ParallelConfig
) -> Iterator[Problem]:
    """Stages of a pipeline send hidden states alone, where the model runs on the sentences of a sample too."""
    entry, stack = OBJECTIVES.of(objective), getattr(model, "stack", None)
    is_run_twice = entry.part.sentences(objective, data.sequence_length) is not None
    if parallel.mesh.pp == 1 or stack is None or not is_run_twice:
        return
    key, choices = "", take(1)
    residual = stack.block.residual
    stream = RESIDUALS.of(residual)
    if not stream.traits.hidden_states:
        key = f"model.stack.block.residual={stream.name}"
        choices += take(stream.part.instead(residual), key="model.stack.block.residual")
    elif stack.block.gates is not None:
        key = "model.stack.block.gates"
        choices += take(None, key=key)
    elif any(MIXERS.of(mixer).part.score_heads(mixer) for mixer in stack.mixers()):
        key = "a mixer that hands on its scores"
    if key:
        what = f"with {key} stages send more than hidden states, and '{entry.name}' has two sequences of them"
        fix = "Tensor, context and data parallelism and ZeRO work."
        yield Problem("parallel.mesh.pp", what, fix, choices=choices)


def boundary_head_knows_the_spans(
    model: Model.Config, objective: Objective.Config
) -> Iterator[Problem]:
    """The model has a head for the boundaries of masked spans where they are told, and only there."""
    entry, path = OBJECTIVES.of(objective), "model.boundary_head"
    longest, head = entry.part.max_span(objective), getattr(model, "boundary_head", None)
    if longest is None:
        if head is not None:
            what = f"objective '{entry.name}' masks no spans, so that the head would not be trained"
            yield Problem(path, what, choices=take(None) + kinds(["span_boundary"], "objective"))
    elif head is None:
        what = f"objective '{entry.name}' predicts tokens by the boundaries of their spans, and the model does not"
        yield Problem(path, what, choices=_of_encoder(("", {"max_span": longest})))
    elif head.max_span != longest:
        what = (
            f"spans have up to {longest} tokens, and the head knows {head.max_span} places in one"
        )
        choices = take(longest) + take(head.max_span, key="objective.max_span")
        yield Problem(f"{path}.max_span", what, choices=choices)


def length_head_is_trained(model: Model.Config, objective: Objective.Config) -> Iterator[Problem]:
    """The model predicts the lengths of targets where the objective tells them, and only there."""
    entry, head, path = (
        OBJECTIVES.of(objective),
        getattr(model, "length_head", None),
        "model.length_head",
    )
    if entry.part.predicts_length and head is None:
        what = f"a target of objective '{entry.name}' is written at once, and the model does not predict its length"
        yield Problem(
            path, what, choices=take({}) + change(("model.kind", "disentangled"), ("", {}))
        )
    if head is not None and not entry.part.predicts_length:
        what = f"objective '{entry.name}' tells no lengths of targets, so that the head would not be trained"
        yield Problem(path, what, choices=take(None) + kinds(["disco"], "objective"))


def sentence_head_has_the_classes(
    model: Model.Config, objective: Objective.Config
) -> Iterator[Problem]:
    """The model has a head for the classes of sequences where the objective has some, and only there."""
    entry, head, path = (
        OBJECTIVES.of(objective),
        getattr(model, "sentence_head", None),
        "model.sentence_head",
    )
    classes = entry.part.classes(objective)
    if classes is None:
        if head is not None:
            what = f"objective '{entry.name}' has no classes of sequences, so that the head would not be trained"
            objectives = OBJECTIVES.able(samples="sentences")
            yield Problem(path, what, choices=take(None) + kinds(objectives, "objective"))
    elif head is None:
        what = f"objective '{entry.name}' has {classes} classes of sequences, and the model has no head for them"
        yield Problem(path, what, choices=_of_encoder(("", {"classes": classes})))
    elif head.classes != classes:
        what = f"objective '{entry.name}' has {classes} classes of sequences, and the head {head.classes}"
        yield Problem(f"{path}.classes", what, choices=take(classes))


def token_types_tell_texts_apart(
    model: Model.Config, objective: Objective.Config
) -> Iterator[Problem]:
    """The model knows two token types where those tell the second of two texts."""
    entry, types = OBJECTIVES.of(objective), getattr(model, "token_types", 0)
    if types >= 2:
        return
    if entry.part.classes(objective) is not None:
        what = f"'{entry.name}' tells the two texts of a pair apart by their types, and the model knows {types}"
        yield Problem("model.token_types", what, choices=_of_encoder(("", 2)))
    elif getattr(objective, "pair_types", False):
        what = "tells the second of two texts by its token type, and the model does not know two"
        choices = take(False) + _of_encoder(("model.token_types", 2))
        yield Problem("objective.pair_types", what, choices=choices)


def _of_encoder(edit: tuple[str, Any]) -> Any:
    """Return the choices of an edit that models of kind encoder have: of this model, or of such a one in its place."""
    return change(edit) + change(("model.kind", "encoder"), edit)


FACTS = (source_entry, labels)
REQUIREMENTS = (
    objective_fits_itself,
    objective_goes_with_model,
    objective_reads_the_right_token,
    texts_with_versions_have_choices,
    objective_needs_are_met,
    documents_are_of_the_objective,
    labels_are_of_the_objective,
    classes_are_those_of_the_data,
    lengths_are_of_pairs,
    bleu_is_of_pairs,
    samples_have_their_tokens,
    only_packed_text_is_split_anew,
    text_is_split_for_sentences,
    sentences_have_global_tokens,
    stages_can_run_it_twice,
    boundary_head_knows_the_spans,
    length_head_is_trained,
    sentence_head_has_the_classes,
    token_types_tell_texts_apart,
)
