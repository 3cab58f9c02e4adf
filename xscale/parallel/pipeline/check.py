"""Checks of a pipeline against the model, its schedule and the rest of the engine."""

from itertools import pairwise

from torch import nn

from xscale.core.choices import Choice
from xscale.core.errors import Problem
from xscale.core.requirements import change, in_parts, kinds, take
from xscale.parallel.config import ParallelConfig
from xscale.parallel.pipeline.schedule import SCHEDULES, schedule_of
from xscale.parallel.pipeline.split import (
    block_paths,
    exits_of,
    params_shared_across_stages,
    split,
    stage_layout,
    stages_of_shared_params,
)
from xscale.parallel.pipeline.stage import edges_read, sent_between


def check(model: nn.Module, config: ParallelConfig, path: str, length: int = 0) -> list[Problem]:
    """Return every problem of the model's stages; `model` is the full one, on meta, `length` that of a sequence (0:
    unknown)."""
    pp, pipeline = config.mesh.pp, config.pipeline
    if pp == 1:
        return []
    if stage_layout(model) is None:
        what = f"{type(model).__name__} is not made of embeddings, stacks and one head, so it has no stages"
        models = kinds(["decoder", "encoder", "encoder_decoder"], "model")
        return [Problem(f"{path}.mesh.pp", what, choices=take(1) + models)]
    problems = _check_engine(config, path)
    schedule, blocks = schedule_of(pipeline), len(block_paths(model))
    if schedule.interleaved and pipeline.stages_per_rank < 2:
        what = f"interleaved_1f1b needs at least 2 stages per rank, got {pipeline.stages_per_rank}"
        choices = take(2) + take("1f1b", key=f"{path}.pipeline.schedule")
        problems.append(Problem(f"{path}.pipeline.stages_per_rank", what, choices=choices))
        return problems
    count = schedule.stages(pipeline, pp)
    on_each_rank = (
        "" if count == pp else f" ({schedule.stages_per_rank(pipeline)} on each of {pp} ranks)"
    )
    if count > blocks:
        what = f"{count} stages{on_each_rank} are more than the model's {blocks} blocks; each needs at least one"
        most = blocks // schedule.stages_per_rank(pipeline)
        degrees = [degree for degree in range(most, 0, -1) if degree < pp]
        choices = take(*degrees) + take("1f1b", key=f"{path}.pipeline.schedule")
        return [
            *problems,
            Problem(f"{path}.mesh.pp", what, "Or take a deeper model.", choices=choices),
        ]
    sizes = pipeline.blocks_per_stage
    if sizes is not None and (len(sizes) != count or sum(sizes) != blocks or min(sizes) < 1):
        what = f"{list(sizes)} does not split the model's {blocks} blocks into {count} stages{on_each_rank}"
        example = [blocks // count + (stage < blocks % count) for stage in range(count)]
        problems.append(
            Problem(f"{path}.pipeline.blocks_per_stage", what, choices=take(example, None))
        )
        return problems
    stage_blocks = split(model, pipeline, count, length)
    problems += _check_handed_on_scores(model, stage_blocks, config, path, length)
    problems += _check_two_stacks(model, stage_blocks, path)
    problems += _check_exits(model, stage_blocks, path)
    if shared := params_shared_across_stages(model, stage_blocks):
        what = f"blocks of different stages share parameters, such as {shared[0]}"
        fix = "Or take blocks_per_stage that keep them together."
        problems.append(Problem(f"{path}.mesh.pp", what, fix, choices=take(1)))
    names_by_advice: dict[tuple[tuple[Choice, ...], str], list[str]] = {}
    for name, stages in stages_of_shared_params(model, stage_blocks).items():
        ranks = [schedule.rank_of(stage, pp) for stage in stages]
        if len(set(ranks)) < len(ranks):
            advice = _one_copy(name, looks_up=getattr(model, "mtp", None) is not None)
            names_by_advice.setdefault(advice, []).append(name)
    for (choices, fix), names in names_by_advice.items():
        more = f" and of others, {len(names)} in all," if len(names) > 1 else ""
        what = f"'{schedule.name}' puts two copies of {names[0]}{more} on one rank"
        problems.append(Problem(f"{path}.pipeline.schedule", what, fix, choices=choices))
    return problems


def _one_copy(name: str, *, looks_up: bool) -> tuple[tuple[Choice, ...], str]:
    """Return what would leave a rank one copy of a parameter that several of its stages use, as choices and a sentence.

    `looks_up`: the last stage reads the embedding, for multi-token prediction."""
    one_stage = take("1f1b")
    if ".position." in name:
        return one_stage + take(False, key="model.position.shared"), ""
    if ".shared." in name:
        return one_stage + take("none", key="model.stack.share"), ""
    if ".position_tables." in name and name.endswith((".content_bias", ".position_bias")):
        return one_stage + take(False, key="model.position.shared_biases"), ""
    if ".position_tables." in name:
        return one_stage, "Or take another stack.block.position."
    if ".core_tables." in name:
        return one_stage, "Or take a core without tables that layers share."
    if name.startswith("distillation."):
        return one_stage + take(None, key="distill.map_width"), ""
    if not name.endswith(".table.weight"):
        return one_stage, ""
    schedules = take(*[schedule.name for schedule in SCHEDULES.values() if not schedule.v_shaped])
    if "source" in name:
        return schedules, ""
    untied = ("model.tied", False)
    return schedules + (change(("model.mtp", None), untied) if looks_up else change(untied)), ""


def _check_handed_on_scores(
    model: nn.Module, stage_blocks: list[list[str]], config: ParallelConfig, path: str, length: int
) -> list[Problem]:
    """Check that stages can send the attention scores that blocks hand to the next."""
    layout = stage_layout(model)
    assert layout is not None
    if len(layout.stacks) > 1:
        why = "stages of an encoder-decoder pass on hidden states alone"
    elif config.mesh.cp > 1:
        why = "with cp > 1 stages pass on hidden states alone"
    else:
        return []
    blocks = block_paths(model)
    received = [
        sent_between(model, blocks[:number], blocks[number:]) for number in range(len(blocks))
    ]
    scores = [sum(tensor.score_heads or 0 for tensor in tensors.values()) for tensors in received]
    heads = dict(zip(blocks, scores, strict=True))
    entered = [paths[0] for paths in stage_blocks[1:] if heads[paths[0]]]
    if not entered:
        return []
    count = heads[entered[0]]
    what = f"a stage begins with {entered[0]}, which reads the attention scores of the block before, and {why}"
    if length:
        what += (
            f"; the scores would be {count} x {length}^2 = {count * length**2:,} numbers a sequence"
        )
    stages = len(stage_blocks)
    starts = [number for number, block in enumerate(blocks) if number and not heads[block]]
    fix = "" if config.mesh.cp > 1 else "Or take tp, which shards the heads, or ZeRO."
    without = take(1, key=f"{path}.mesh.cp") if config.mesh.cp > 1 else ()
    if len(starts) < stages - 1:
        degrees = range(len(starts) + 1, 0, -1)
        return [Problem(f"{path}.mesh.pp", what, fix, choices=take(*degrees) + without)]
    chosen = [starts[number * len(starts) // (stages - 1)] for number in range(stages - 1)]
    sizes = [end - start for start, end in pairwise([0, *chosen, len(blocks)])]
    return [Problem(f"{path}.pipeline.blocks_per_stage", what, fix, choices=take(sizes) + without)]


def _check_two_stacks(model: nn.Module, stage_blocks: list[list[str]], path: str) -> list[Problem]:
    """Check that no stage of an encoder-decoder needs more than hidden states; for scores see above."""
    layout = stage_layout(model)
    assert layout is not None
    if len(layout.stacks) == 1:
        return []
    stages = range(len(stage_blocks))
    received = [
        tensor for stage in stages for tensor in edges_read(model, stage_blocks, stage).values()
    ]
    problems = []
    if any(tensor.values for tensor in received):
        what = "blocks read the values of the first layer, and stages of an encoder-decoder pass on hidden states alone"
        mixers = [module for module in model.modules() if getattr(module, "hands_on_values", False)]
        choices = take(1)
        for kind in sorted({str(mixer.Config.kind) for mixer in mixers}):  # type: ignore[union-attr]
            choices += in_parts("mixer", kind, "value_latent_width", None)
        problems.append(Problem(f"{path}.mesh.pp", what, choices=choices))
    return problems


def _check_exits(model: nn.Module, stage_blocks: list[list[str]], path: str) -> list[Problem]:
    """Check that each exit has its head on its stage."""
    exits = exits_of(model)
    away = [
        block
        for block, part in exits.items()
        if part.head is None and block not in stage_blocks[-1]
    ]
    if not away:
        return []
    stack, first = away[0].split(".")[0], stage_blocks[-1][0].split(".")[-1]
    number = away[0].split(".")[-1]
    what = f"the exit after block {number} predicts by the model's head, which is on the last stage, from block {first}"
    later = [int(block.split(".")[-1]) for block in exits if block in stage_blocks[-1]]
    choices = take(1) + take("own", key=f"model.{stack}.exits.head")
    choices += take(later, key=f"model.{stack}.exits.blocks") if later else ()
    return [Problem(f"{path}.mesh.pp", what, choices=choices)]


def _check_engine(config: ParallelConfig, path: str) -> list[Problem]:
    schedule = schedule_of(config.pipeline)
    if not schedule.splits_backward:
        return []
    problems = []
    able = [other.name for other in SCHEDULES.values() if not other.splits_backward]
    schedules = take(*able, key=f"{path}.pipeline.schedule")
    if config.zero.stage == 3:
        what = f"'{schedule.name}' splits the backward and needs gathered parameters, and ZeRO-3 reshards them"
        problems.append(Problem(f"{path}.zero.stage", what, choices=take(0, 1, 2) + schedules))
    if config.compile:
        what = f"'{schedule.name}' splits the backward, and compiled blocks free the activations of its second part"
        problems.append(Problem(f"{path}.compile", what, choices=take(False) + schedules))
    if config.recompute.every:
        what = f"'{schedule.name}' splits the backward, and both parts would recompute the forward"
        problems.append(Problem(f"{path}.recompute.every", what, choices=take(0) + schedules))
    return problems


def check_micro_batches(config: ParallelConfig, micros: int, path: str) -> list[Problem]:
    """Return a problem when the schedule cannot run `micros` micro-batches per rank and step."""
    pp, where = config.mesh.pp, f"{path}.pipeline.schedule"
    if pp == 1:
        return []
    name = config.pipeline.schedule
    if name == "interleaved_1f1b" and micros % pp:
        what = (
            f"'{name}' takes micro-batches in rounds of pp={pp}, and a step has {micros} per rank"
        )
        fix = f"Or make it a multiple of {pp} by train.batch_size or train.micro_batch_size."
        return [Problem(where, what, fix, choices=take("1f1b"))]
    if name == "dualpipe_v" and micros < 2 * pp:
        what = f"'{name}' needs at least as many micro-batches as stages, {2 * pp}, and a step has {micros} per rank"
        fix = "Or take a larger train.batch_size or a smaller train.micro_batch_size."
        return [Problem(where, what, fix, choices=take("zbv"))]
    return []
