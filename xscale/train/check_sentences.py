"""Check that objective, data and model agree on sentences, masked spans and the lengths of targets."""

from xscale.core.errors import Problem
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.stack import StackConfig
from xscale.objective.objective import OBJECTIVES
from xscale.train.settings import Settings


def check_sentences(settings: Settings) -> list[Problem]:
    """List where the data has no sentences for an objective on them, or the model no head for classes or boundaries."""
    of_model = _check_model(settings) + _check_boundaries(settings) + _check_contrast(settings)
    of_model += _check_lengths(settings)
    return _check_data(settings) + of_model


def _check_contrast(settings: Settings) -> list[Problem]:
    objective = OBJECTIVES.of(settings.objective)
    count = objective.part.sentences(settings.objective, settings.data.sequence_length)
    if count is None:
        return []
    problems, tokens, parallel = [], getattr(settings.model, "global_tokens", 0), settings.parallel
    if tokens < count:
        what = f"'{objective.name}' needs a global token for each of {count} sentences, and the model has {tokens}"
        problems.append(Problem("model.global_tokens", what, f"Take {count} in a model of kind encoder."))
    stack = getattr(settings.model, "stack", None)
    if parallel.mesh.pp > 1 and stack is not None and (key := _sent_beside_states(stack)):
        what = f"with {key} stages send more than hidden states, and '{objective.name}' has two sequences of them"
        fix = "Take 1; tensor, context and data parallelism and ZeRO work."
        problems.append(Problem("parallel.mesh.pp", what, fix))
    if parallel.zero.engine == "deepspeed":
        what = f"'{objective.name}' runs the model twice in a forward, which is for the engine torch alone"
        problems.append(Problem("parallel.zero.engine", what, "Take torch."))
    if settings.distill is not None:
        what = f"'{objective.name}' runs the model twice in a forward, and a student is compared with its teacher once"
        problems.append(Problem("distill", what, "Take null, or objective.kind=masked."))
    return problems


def _sent_beside_states(stack: StackConfig) -> str | None:
    """Return the key for which stages of a pipeline send more than hidden states; None: there is none."""
    if stack.block.residual == "reversible":
        return "model.stack.block.residual=reversible"
    if stack.block.gates is not None:
        return "model.stack.block.gates"
    hands_on = any(MIXERS.of(mixer).part.score_heads(mixer) for mixer in stack.mixers())
    return "a mixer that hands on its scores" if hands_on else None


def _check_boundaries(settings: Settings) -> list[Problem]:
    objective = OBJECTIVES.of(settings.objective)
    longest, head = objective.part.max_span(settings.objective), getattr(settings.model, "boundary_head", None)
    path = "model.boundary_head"
    if longest is None:
        what = f"objective '{objective.name}' masks no spans, so that the head would not be trained"
        return [] if head is None else [Problem(path, what, "Take null, or objective=span_boundary.")]
    if head is None:
        what = f"objective '{objective.name}' predicts tokens by the boundaries of their spans, and the model does not"
        return [Problem(path, what, f"Take {{max_span: {longest}}} in a model of kind encoder.")]
    if head.max_span != longest:
        what = f"spans have up to {longest} tokens, and the head knows {head.max_span} places in one"
        return [Problem(f"{path}.max_span", what, f"Take {longest}, or another objective.max_span.")]
    return []


def _check_lengths(settings: Settings) -> list[Problem]:
    objective = OBJECTIVES.of(settings.objective)
    head, path = getattr(settings.model, "length_head", None), "model.length_head"
    if objective.part.predicts_length and head is None:
        what = f"a target of objective '{objective.name}' is written at once, and the model does not predict its length"
        return [Problem(path, what, "Take {} in a model of kind disentangled.")]
    if head is not None and not objective.part.predicts_length:
        what = f"objective '{objective.name}' tells no lengths of targets, so that the head would not be trained"
        return [Problem(path, what, "Take null, or objective.kind=disco.")]
    return []


def _check_data(settings: Settings) -> list[Problem]:
    name, data = OBJECTIVES.of(settings.objective).name, settings.data
    able = ", ".join(OBJECTIVES.able(samples="sentences"))
    if not settings.has_sentences:
        what = f"objective '{name}' reads no sentences"
        fix = f"Take false, or an objective of {able}."
        return [Problem("data.split_sentences", what, fix)] if data.split_sentences else []
    problems = []
    if not data.split_sentences:
        what = f"objective '{name}' reads sentences, and the text is not split into them"
        packed = ", ".join(OBJECTIVES.able(samples="packed"))
        problems.append(Problem("data.split_sentences", what, f"Take true, or an objective of {packed}."))
    if data.cross_documents:
        what = f"'{name}' hides padding as a document of its own"
        problems.append(Problem("data.cross_documents", what, "Take false."))
    if data.sequence_length < 5:
        what = "two texts of a token each, [CLS] and two [SEP] are five tokens"
        problems.append(Problem("data.sequence_length", what, "Take at least 5."))
    if "data.sequence_length" in settings.run.allow_changed:
        what = "the text of another length is split into other samples, so that the run could not resume in its place"
        problems.append(Problem("run.allow_changed", what, "Leave data.sequence_length out of it."))
    return problems


def _check_model(settings: Settings) -> list[Problem]:
    objective, model = OBJECTIVES.of(settings.objective), settings.model
    classes = objective.part.classes(settings.objective)
    head = getattr(model, "sentence_head", None)
    path = "model.sentence_head"
    if classes is None:
        what = f"objective '{objective.name}' has no classes of sequences, so that the head would not be trained"
        problems = [] if head is None else [Problem(path, what, "Take null, or an objective on sentences.")]
        if getattr(settings.objective, "pair_types", False) and getattr(model, "token_types", 0) < 2:
            what = "tells the second of two texts by its token type, and the model does not know two"
            fix = "Take false, or model.token_types=2 in a model of kind encoder."
            problems.append(Problem("objective.pair_types", what, fix))
        return problems
    problems = []
    if head is None:
        what = f"objective '{objective.name}' has {classes} classes of sequences, and the model has no head for them"
        problems.append(Problem(path, what, f"Take {{classes: {classes}}} in a model of kind encoder."))
    elif head.classes != classes:
        what = f"objective '{objective.name}' has {classes} classes of sequences, and the head {head.classes}"
        problems.append(Problem(f"{path}.classes", what, f"Take {classes}."))
    types = getattr(model, "token_types", 0)
    if types < 2:
        what = f"'{objective.name}' tells the two texts of a pair apart by their types, and the model knows {types}"
        problems.append(Problem("model.token_types", what, "Take 2 in a model of kind encoder."))
    return problems
