"""What a model, a schedule and the rest of the engine do not allow of a pipeline, each with what would work."""

from torch import nn

from xscale.core.errors import Problem
from xscale.parallel.config import ParallelConfig
from xscale.parallel.pipeline.schedule import SCHEDULES, schedule_of
from xscale.parallel.pipeline.split import blocks_of, form_of, holders, shared_blocks, split


def check(model: nn.Module, config: ParallelConfig, path: str) -> list[Problem]:
    """Every problem of the model's stages; `model` is whole, on meta."""
    pp, pipeline = config.mesh.pp, config.pipeline
    if pp == 1:
        return []
    if form_of(model) is None:
        what = f"a {type(model).__name__} is not made of embeddings, stacks and one head, so it has no stages"
        return [Problem(f"{path}.mesh.pp", what, "Take pp=1, or a decoder, encoder or encoder_decoder.")]
    problems = _check_engine(config, path)
    schedule, blocks = schedule_of(pipeline), len(blocks_of(model))
    if schedule.several and pipeline.chunks < 2:
        what = f"{pipeline.chunks} stage on each rank interleaves nothing"
        problems.append(Problem(f"{path}.pipeline.chunks", what, "Take at least 2, or schedule 1f1b."))
        return problems
    count = schedule.stages(pipeline, pp)
    each = "" if count == pp else f" ({schedule.chunks(pipeline)} on each of {pp} ranks)"
    if count > blocks:
        what = f"{count} stages{each} are more than the model's {blocks} blocks, and each needs one"
        most = blocks // schedule.chunks(pipeline)
        fix = f"Take pp of at most {most}." if most > 1 else "Take a deeper model or schedule 1f1b, or pp=1."
        return [*problems, Problem(f"{path}.mesh.pp", what, fix)]
    hand = pipeline.stages_by_hand
    if hand is not None and (len(hand) != count or sum(hand) != blocks or min(hand) < 1):
        what = f"{list(hand)} does not deal the model's {blocks} blocks to {count} stages{each}"
        like = [blocks // count + (stage < blocks % count) for stage in range(count)]
        problems.append(Problem(f"{path}.pipeline.stages_by_hand", what, f"Such as {like}, or null."))
        return problems
    parts = split(model, pipeline, count, 0)
    if shared := shared_blocks(model, parts):
        what = f"blocks of different stages share parameters, such as {shared[0]}"
        problems.append(Problem(f"{path}.mesh.pp", what, "Take pp=1, or stages_by_hand that keep them together."))
    for name, stages in holders(model, parts).items():
        ranks = [schedule.rank_of(stage, pp) for stage in stages]
        if len(set(ranks)) < len(ranks):
            what = f"'{schedule.name}' has {name} twice on a rank"
            straight = ", ".join(one.name for one in SCHEDULES.values() if not one.turns)
            fix = f"Take one of the schedules {straight}" + ("." if "source" in name else ", or tied: false.")
            problems.append(Problem(f"{path}.pipeline.schedule", what, fix))
    return problems


def _check_engine(config: ParallelConfig, path: str) -> list[Problem]:
    schedule = schedule_of(config.pipeline)
    if not schedule.splits:
        return []
    problems = []
    whole = ", ".join(one.name for one in SCHEDULES.values() if not one.splits)
    if config.zero.stage == 3:
        what = f"'{schedule.name}' splits backwards, for which parameters must stay whole, and stage 3 forgets them"
        problems.append(Problem(f"{path}.zero.stage", what, f"Take stage 0, 1 or 2, or a schedule of {whole}."))
    if config.compile:
        what = f"'{schedule.name}' splits backwards, and compiled blocks free what the second part needs"
        problems.append(Problem(f"{path}.compile", what, f"Take compile=false, or a schedule of {whole}."))
    if config.recompute.every:
        what = f"'{schedule.name}' splits backwards, and both parts would compute the forward again"
        problems.append(Problem(f"{path}.recompute", what, f"Keep activations, or take a schedule of {whole}."))
    return problems


def check_micro_batches(config: ParallelConfig, micros: int, path: str) -> list[Problem]:
    """Micro-batches of a step on a rank that the schedule cannot deal with."""
    pp, where = config.mesh.pp, f"{path}.pipeline.schedule"
    if pp == 1:
        return []
    name = config.pipeline.schedule
    if name == "interleaved_1f1b" and micros % pp:
        what = f"'{name}' takes micro-batches in rounds of pp = {pp}, and a step has {micros} on each rank"
        return [Problem(where, what, f"Make it a multiple of {pp} by train.batch_size or micro_batch_size, or 1f1b.")]
    if name == "dualpipe_v" and micros < 2 * pp:
        what = f"'{name}' needs as many micro-batches as stages, {2 * pp}, and a step has {micros} on each rank"
        return [Problem(where, what, "Take a larger train.batch_size or a smaller micro_batch_size, or zbv.")]
    return []
