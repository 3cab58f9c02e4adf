"""Checks of what a distilled model cannot be: with its config alone, and with the teacher that is on disk."""

from torch import nn

from xscale.core.choices import Choice, Edit
from xscale.core.errors import ConfigError, Problem
from xscale.core.requirements import change, divisors, in_parts, kinds, take
from xscale.distill.teacher_source import (
    BLOCKS,
    TeacherSource,
    find_teacher,
    teacher_degrees,
    teacher_folder,
)
from xscale.mesh import axes
from xscale.nn.adapt.observed_states import attentions_of
from xscale.nn.attention.softmax import Softmax
from xscale.nn.blocks.stack import Stack
from xscale.nn.depth.exits import Exits
from xscale.nn.depth.halting import Halting
from xscale.nn.depth.sequence_pooling import SequencePooling
from xscale.nn.head.distillation import DistillConfig
from xscale.nn.head.head import Head
from xscale.nn.mixer.attention import Attention
from xscale.nn.model.embed import global_tokens_of
from xscale.nn.model.model import MODELS
from xscale.objective.objective import OBJECTIVES
from xscale.parallel.config import ParallelConfig
from xscale.parallel.context.styles import sublayers_on_gathered
from xscale.parallel.distillation import runs_equally_often, runs_in_one_stage
from xscale.settings.hidden_tokens import parts_without_documents
from xscale.settings.settings import Settings, build_on_meta

PATH = "distill"
OTHER_LOSSES = ("embedding_weight", "hidden_weight", "attention_weight", "cosine_weight")
"""Keys of the losses on states, beside those on predictions."""


def layers_of(
    config: DistillConfig, student: nn.Module, teacher: nn.Module
) -> tuple[int, ...] | None:
    """Return the teacher's block of each of the student's; None: they do not map."""
    stacks = [getattr(model, "stack", None) for model in (student, teacher)]
    if not all(isinstance(stack, Stack) for stack in stacks):
        return None
    depths = [len(stack.blocks) for stack in stacks if isinstance(stack, Stack)]
    return config.layers_of(*depths)


def check_distillation(settings: Settings, world: int) -> list[Problem]:
    """List what the section `distill` cannot be; needs no teacher and no model."""
    config = settings.distill
    if config is None:
        return []
    problems = []
    if config.teacher is None and config.train_teacher is None:
        what = "there is no teacher"
        fix = "Or give the folder of a run or of a Hugging Face model."
        choices = take({}, key=f"{PATH}.train_teacher") + take(None, key=PATH)
        problems.append(Problem(f"{PATH}.teacher", what, fix, choices=choices))
    if not config.inner_weight + config.outer_weight:
        choices = take(0.5, key=f"{PATH}.soft_weight")
        problems.append(Problem(PATH, "all weights are 0, so nothing is learned", choices=choices))
    if config.inner_until is not None and not (config.inner_weight and config.outer_weight):
        what = "one of the two stages would train nothing: it needs weights of inner states and of outputs"
        weights = take(
            1.0, key=f"{PATH}.{'soft_weight' if config.inner_weight else 'hidden_weight'}"
        )
        problems.append(Problem(f"{PATH}.inner_until", what, choices=take(None) + weights))
    if config.map_width is not None and not config.embedding_weight + config.hidden_weight:
        what = "the maps are for the losses of embeddings and hidden states, which have no weight"
        choices = take(None) + take(1.0, key=f"{PATH}.hidden_weight")
        problems.append(Problem(f"{PATH}.map_width", what, choices=choices))
    problems += _check_padding(settings, config)
    return problems + _check_layout(settings, config, world)


def _check_padding(settings: Settings, config: DistillConfig) -> list[Problem]:
    """Refuse losses that are means over all tokens where some of them are padding."""
    objective = OBJECTIVES.of(settings.objective)
    all_tokens = (
        config.inner_weight
        + config.cosine_weight
        + config.soft_weight * (config.soft_over == "all")
    )
    if not all_tokens or (objective.traits.samples == "packed" and not objective.traits.padded):
        return []
    if objective.traits.labels is not None:
        # Inner states are compared over the text of each example.
        what = f"objective '{objective.name}' predicts at its targets alone"
        problem = Problem(f"{PATH}.soft_over", what, choices=take("targets"))
        return [problem] * bool(config.soft_weight and config.soft_over == "all")
    what = f"states and logits of all tokens are compared, and samples of '{objective.name}' end in padding"
    fix = "The soft loss over targets alone, or an objective on packed text, needs no other tokens."
    return [
        Problem(
            PATH, what, fix, choices=change(*_soft_alone(config), (f"{PATH}.soft_over", "targets"))
        )
    ]


def _check_layout(settings: Settings, config: DistillConfig, world: int) -> list[Problem]:
    mesh, problems = settings.parallel.mesh, []
    if settings.parallel.zero.engine != "torch":
        what = "distillation with DeepSpeed is not supported"
        problems.append(Problem("parallel.zero.engine", what, choices=take("torch")))
    problems += [] if axes.check(mesh, world) else _check_ranks(settings, config, world)
    return problems


def _check_ranks(settings: Settings, config: DistillConfig, world: int) -> list[Problem]:
    """Check that there are ranks for the groups of the teacher, and that those of one group run it at the same time."""
    mesh = settings.parallel.mesh
    tp, of_stage = config.tp or mesh.tp, world // mesh.pp
    if of_stage % tp:
        have = f"a stage has {of_stage}" if mesh.pp > 1 else f"there are {of_stage}"
        what = f"a teacher with tp={tp} needs a multiple of {tp} ranks, and {have}"
        fix = f"Or start a multiple of {tp * mesh.pp} processes."
        return [Problem(f"{PATH}.tp", what, fix, choices=divisors(of_stage))]
    student, (_, degrees) = axes.resolve(mesh, world), teacher_degrees(settings, world)
    if config.zero == 3 and not runs_equally_often(student, degrees):
        what = f"ranks of a teacher with tp={tp} and ZeRO-3 would run it on different numbers of micro-batches"
        return [
            Problem(f"{PATH}.tp", what, choices=divisors(mesh.tp) + take(0, key=f"{PATH}.zero"))
        ]
    if runs_in_one_stage(student, degrees, sharded=config.zero == 3):
        return []
    what = "a group of the teacher would have ranks of several pipeline stages, which run it at different times"
    pp_first = ["pp", *[axis for axis in mesh.order if axis != "pp"]]
    return [
        Problem(
            "parallel.mesh.order", what, choices=take(pp_first) + take(1, key="parallel.mesh.pp")
        )
    ]


def check_student(
    model: nn.Module, config: DistillConfig, parallel: ParallelConfig
) -> list[Problem]:
    """Check a student on meta."""
    stack = getattr(model, "stack", None)
    problems = []
    for path, part in model.named_modules():
        if isinstance(part, Exits):
            what = "the exits have losses of their own, which know no teacher"
            problems.append(
                Problem(f"model.{path}", what, choices=take(None) + take(None, key=PATH))
            )
    if not config.inner_weight + config.cosine_weight and not config.init_from_teacher:
        return problems
    if not isinstance(stack, Stack):
        what = "states of two stacks are not mapped to those of a teacher"
        problems.append(
            Problem(
                PATH, what, "Or take a model of one stack.", choices=change(*_soft_alone(config))
            )
        )
    elif config.inner_weight and (not stack.stream.is_hidden_states or stack.find(Halting)):
        form = (
            "a token that halts has one output"
            if stack.stream.is_hidden_states
            else stack.stream.form
        )
        what = f"{form}, and a hidden state after each block is compared"
        problems.append(
            Problem(f"{PATH}.hidden_weight", what, choices=change(*_soft_alone(config)))
        )
    elif stack.find(SequencePooling):
        what = "the states of a shortened sequence are of windows, and the teacher's of tokens"
        problems.append(
            Problem("model.stack.pooling", what, choices=take(None) + change(*_soft_alone(config)))
        )
    elif config.attention_weight:
        problems += _check_attention(stack, len(stack.blocks), "the student")
        if parallel.mesh.cp > 1 and sublayers_on_gathered(stack, parallel):
            what = "attention on the gathered sequence hands on no scores of a rank's queries"
            fix = "Or take mixers with a style of their own."
            choices = take(0.0, key=f"{PATH}.attention_weight")
            choices += in_parts("mixer", "attention", "dropout", 0.0)
            problems.append(Problem("parallel.context.gather", what, fix, choices=choices))
    return problems


def _soft_alone(config: DistillConfig) -> list[Edit]:
    """Return the edits of a student that learns from its teacher's predictions alone."""
    values: dict[str, float | bool | None] = {
        "soft_weight": config.soft_weight or 0.5,
        **dict.fromkeys(OTHER_LOSSES, 0.0),
    }
    values |= {"inner_until": None, "map_width": None, "init_from_teacher": False}
    return [
        (f"{PATH}.{key}", value) for key, value in values.items() if getattr(config, key) != value
    ]


def _check_attention(stack: Stack, depth: int, which: str) -> list[Problem]:
    attentions = attentions_of(stack)
    if len(attentions) == depth and all(
        _has_scores(attention) for attention in attentions.values()
    ):
        return []
    what = (
        f"{which} has blocks without one attention of core softmax, whose scores could be compared"
    )
    fix = "Or take the mixer attention with the core softmax, without soft_cap and sinks."
    return [Problem(f"{PATH}.attention_weight", what, fix, choices=take(0.0))]


def _has_scores(attention: Attention) -> bool:
    return (
        isinstance(attention.core, Softmax)
        and attention.core.soft_cap is None
        and attention.core.sinks is None
    )


def check_teacher(settings: Settings, source: TeacherSource) -> list[Problem]:
    """List why the student cannot learn from this teacher."""
    config, where = settings.distill, f"{PATH}.teacher"
    assert config is not None
    student, teacher = MODELS.of(settings.model), MODELS.of(source.settings.model)
    if (student.traits.causal, student.traits.source) != (
        teacher.traits.causal,
        teacher.traits.source,
    ):
        what = f"the teacher is of kind '{teacher.name}', and the student of kind '{student.name}'"
        same = MODELS.able(causal=student.traits.causal, source=student.traits.source)
        fitting = MODELS.able(causal=teacher.traits.causal, source=teacher.traits.source)
        fix = f"Or take a teacher of {', '.join(same)}."
        return [Problem(where, what, fix, choices=kinds(fitting, "model"))]
    problems = _check_heads(settings, source.settings)
    longest, length = source.settings.data.sequence_length, settings.data.sequence_length
    if length > longest:
        what = f"the teacher reads at most {longest} tokens, and data.sequence_length is {length}"
        problems.append(Problem(where, what, choices=take(longest, key="data.sequence_length")))
    student_model, teacher_model = build_on_meta(settings, 64), build_on_meta(source.settings, 64)
    problems += _check_documents(settings, teacher_model)
    needs_layers = config.inner_weight or config.init_from_teacher
    return problems + (
        _check_blocks(config, student_model, teacher_model)
        if needs_layers or config.cosine_weight
        else []
    )


def _check_documents(settings: Settings, teacher: nn.Module) -> list[Problem]:
    """Check that the teacher masks from each other the documents of the student's samples, or their padding."""
    pads = OBJECTIVES.of(settings.objective).traits.padded
    if settings.data.cross_documents and not pads:
        return []
    choices = () if pads else take(True, key="data.cross_documents")
    fix = "Take another teacher." if pads else "Or take another teacher."
    hidden = "padding" if settings.data.cross_documents else "documents"
    reasons = [
        f"{family} '{kind}' cannot mask them" for family, kind in parts_without_documents(teacher)
    ]
    reasons += ["its global tokens are shared by them"] * bool(global_tokens_of(teacher))
    return [
        Problem(
            f"{PATH}.teacher",
            f"the teacher cannot tell the {hidden} of a sample apart: {reason}",
            fix,
            choices=choices,
        )
        for reason in reasons
    ]


def _check_heads(settings: Settings, teacher: Settings) -> list[Problem]:
    """Check that two models predict the same: tokens, a score, or the same classes."""
    config, path = settings.distill, f"{PATH}.teacher"
    assert config is not None
    if not config.soft_weight:
        return []
    sizes = [
        OBJECTIVES.of(side.objective).part.head_sizes(side.objective)
        for side in (settings, teacher)
    ]
    kinds = [
        "tokens" if size is None else "a score" if size.scores else f"{size.outputs} classes"
        for size in sizes
    ]
    names = [getattr(side.data.source, "classes", None) for side in (settings, teacher)]
    if kinds[0] == kinds[1] and None not in names and names[0] != names[1]:
        kinds = [f"the classes {', '.join(classes)}" for classes in names if classes is not None]
    if kinds[0] == kinds[1]:
        return []
    what = f"the teacher predicts {kinds[1]}, and the student {kinds[0]}"
    fix = "Or take a teacher that was trained on the student's labels."
    return [Problem(path, what, fix, choices=take(0.0, key=f"{PATH}.soft_weight"))]


def _check_blocks(config: DistillConfig, student: nn.Module, teacher: nn.Module) -> list[Problem]:
    """Check that the blocks of two models on meta map to each other."""
    stack, teacher_stack = (getattr(model, "stack", None) for model in (student, teacher))
    if not isinstance(stack, Stack) or not isinstance(teacher_stack, Stack):
        choices = change(*_soft_alone(config))
        return [Problem(f"{PATH}.teacher", "it has no single stack of blocks", choices=choices)]
    depth = len(teacher_stack.blocks)
    layers = layers_of(config, student, teacher)
    problems = []
    if (
        layers is None
        or len(layers) != len(stack.blocks)
        or any(not 0 <= layer < depth for layer in layers)
    ):
        what = f"the {len(stack.blocks)} blocks of the student do not map to the {depth} of the teacher"
        fix = f"They are {len(stack.blocks)} numbers from 0 to {depth - 1}."
        return [Problem(f"{PATH}.layers", what, fix, choices=_evenly(len(stack.blocks), depth))]
    heads = [model.get_submodule("head") for model in (student, teacher)]
    widths = [head.width for head in heads if isinstance(head, Head)]
    mapped = widths[0] if config.map_width is None else config.map_width
    if config.embedding_weight + config.hidden_weight and mapped != widths[1]:
        what = f"states of width {mapped} are compared with the teacher's of width {widths[1]}"
        fix = f"Learned maps then lead from {widths[0]} to it."
        problems.append(Problem(f"{PATH}.map_width", what, fix, choices=take(widths[1])))
    if config.cosine_weight and widths[0] != widths[1]:
        what = f"the outputs have the widths {widths[0]} and {widths[1]}"
        choices = take(0.0) + take(widths[1], key="model.width")
        problems.append(Problem(f"{PATH}.cosine_weight", what, choices=choices))
    if config.attention_weight:
        problems += _check_attention(teacher_stack, depth, "the teacher")
        pairs = zip(layers, attentions_of(stack).values(), strict=False) if not problems else ()
        counts = {
            (a.query_channels // a.head_width, _heads(teacher_stack, layer)) for layer, a in pairs
        }
        for heads_of_student, taught in sorted(counts):
            if heads_of_student != taught:
                what = f"attention scores of {heads_of_student} heads are compared with the teacher's of {taught}"
                choices = take(0.0) + in_parts("mixer", "attention", "heads", taught)
                problems.append(Problem(f"{PATH}.attention_weight", what, choices=choices))
    return problems + (_check_shapes(student, teacher, layers) if config.init_from_teacher else [])


def _evenly(depth: int, taught: int) -> tuple[Choice, ...]:
    """Return the choice of layers of a teacher of `taught` blocks that are equally far apart, the last one included."""
    return (
        take([(layer + 1) * taught // depth - 1 for layer in range(depth)])
        if depth <= taught
        else ()
    )


def _heads(stack: Stack, layer: int) -> int:
    attention = attentions_of(stack)[layer]
    return attention.query_channels // attention.head_width


def _check_shapes(student: nn.Module, teacher: nn.Module, layers: tuple[int, ...]) -> list[Problem]:
    """Check that each parameter of the student is one of the teacher, of the same shape."""
    parameters = dict(teacher.named_parameters())
    for name, parameter in student.named_parameters():
        number, _, inner = name.removeprefix(BLOCKS).partition(".")
        in_stack = name.startswith(BLOCKS)
        taught = parameters.get(f"{BLOCKS}{layers[int(number)]}.{inner}" if in_stack else name)
        is_untaught = name.startswith("distillation.") or (
            name.startswith("mtp.") and taught is None
        )
        if is_untaught or (taught is not None and taught.shape == parameter.shape):
            continue
        other = "has no such parameter" if taught is None else f"has {list(taught.shape)}"
        what = (
            f"{name} of the student has the shape {list(parameter.shape)}, and the teacher {other}"
        )
        fix = "Or take a student that differs in depth alone."
        return [Problem(f"{PATH}.init_from_teacher", what, fix, choices=take(False))]
    return []


def check_teacher_on_disk(settings: Settings) -> list[Problem]:
    """List why the student cannot learn from the teacher that is there; one that is trained first need not be there."""
    if settings.distill is None or (
        settings.distill.teacher is None and settings.distill.train_teacher is None
    ):
        return []
    if (
        settings.distill.train_teacher is not None
        and not (teacher_folder(settings) / "checkpoints").is_dir()
    ):
        return []
    try:
        return check_teacher(settings, find_teacher(settings))
    except ConfigError as error:
        return list(error.problems)
