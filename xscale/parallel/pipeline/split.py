"""Split of blocks into pipeline stages: as configured, or minimising the cost of the most expensive stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from xscale.nn.blocks.block import Block
from xscale.nn.blocks.stack import Stack
from xscale.nn.ffn.ffn import active_fractions
from xscale.nn.head.head import Head
from xscale.nn.mixer.mixer import Mixer
from xscale.nn.model.embed import global_tokens_of
from xscale.nn.module import Module, seams_of
from xscale.nn.roles import Role
from xscale.parallel.config import PipelineConfig


@dataclass(frozen=True)
class StageLayout:
    """Submodules of a model that can be split into stages: embeddings, consecutive stacks, one head."""

    inputs: tuple[str, ...]
    """Names of the Embeds, one for each stack."""
    stacks: tuple[str, ...]


STAGE_LAYOUTS = (
    StageLayout(("embed",), ("stack",)),
    StageLayout(("source", "target"), ("encoder", "decoder")),
)


def stage_layout(model: nn.Module) -> StageLayout | None:
    """Return the model's layout; None when it cannot be split into stages."""
    for layout in STAGE_LAYOUTS:
        # What has no parameters, as a loss on hidden states, stands on each stage.
        children = {
            name: child
            for name, child in model.named_children()
            if any(True for _ in child.parameters())
        }
        children = {
            name: child
            for name, child in children.items()
            if not getattr(child, "beside_stages", False)
        }
        if children.keys() != {*layout.inputs, *layout.stacks, "head"}:
            continue
        embeds = all(_embeds_tokens(children[name]) for name in layout.inputs)
        stacks = all(isinstance(children[name], Stack) for name in layout.stacks)
        if embeds and stacks and isinstance(children["head"], Head):
            return layout
    return None


def _embeds_tokens(child: nn.Module) -> bool:
    return Role.EMBEDDING in seams_of(child).values()


def block_paths(model: nn.Module) -> list[str]:
    """Return the paths of all blocks, in the order of the forward."""
    layout = stage_layout(model)
    assert layout is not None
    return [
        f"{name}.blocks.{layer}"
        for name in layout.stacks
        for layer in model.get_submodule(name).blocks  # type: ignore[union-attr]
    ]


def split(model: nn.Module, config: PipelineConfig, stages: int, length: int) -> list[list[str]]:
    """Return the paths of each stage's blocks; `length` is that of a sequence (0: unknown, and not counted)."""
    blocks = block_paths(model)
    if config.blocks_per_stage is not None:
        sizes = list(config.blocks_per_stage)
    else:
        costs, head = block_costs(model, length)
        sizes = balance(costs, head, stages)
    assert len(sizes) == stages
    assert sum(sizes) == len(blocks)
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [blocks[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def block_costs(model: nn.Module, length: int) -> tuple[list[float], float]:
    """Return the multiply-adds per token of each block, with its exit, and of what follows the last one: the head, and
    the modules of multi-token prediction with a head for each. Embeddings are lookups and cost nothing."""
    full_length = length and length + global_tokens_of(model)
    costs = [_cost(model.get_submodule(path), full_length) for path in block_paths(model)]
    head = model.get_submodule("head")
    assert isinstance(head, Head)
    after = exits_of(model)
    paths = block_paths(model)
    costs = [
        cost + float(head.weight.numel()) * (path in after)
        for path, cost in zip(paths, costs, strict=True)
    ]
    mtp: Any = getattr(model, "mtp", None)
    if mtp is None:
        return costs, float(head.weight.numel())
    ahead = [block for block in mtp.modules() if isinstance(block, Block)]
    projections = sum(part.project.weight.numel() for part in mtp.at.values())
    heads = float(head.weight.numel() * (1 + len(mtp.at)))
    return costs, heads + projections + sum(_cost(block, full_length) for block in ahead)


def exits_of(model: nn.Module) -> dict[str, Any]:
    """Return the exits of the model by the path of their block."""
    stacks = [(path, module) for path, module in model.named_modules() if isinstance(module, Stack)]
    passes = [(path, part) for path, stack in stacks for part in stack.passes()]
    return {
        f"{path}.blocks.{layer}": head
        for path, part in passes
        for layer, head in part.heads_after_blocks().items()
    }


def _cost(block: nn.Module, length: int) -> float:
    assert isinstance(block, Block)
    total = 0.0
    for sublayer in block.sublayers().values():
        fractions = active_fractions(sublayer)
        total += sum(
            value.numel() * fractions.get(name, 1.0) for name, value in sublayer.named_parameters()
        )
        if length:
            mixers = [module for module in sublayer.modules() if isinstance(module, Mixer)]
            total += sum(mixer.multiply_adds(length, length) for mixer in mixers) / length
    return total


def balance(blocks: Sequence[float], head: float, stages: int) -> list[int]:
    """Return the number of consecutive blocks per stage, at least one, that minimises the largest cost of a stage.

    The last stage also has the head. Among equal splits later stages get fewer blocks, as earlier ones start sooner.
    """
    count = len(blocks)
    sums = [0.0]
    for cost in blocks:
        sums.append(sums[-1] + cost)
    # best[k][i]: the minimal largest cost of i blocks in k stages, and the first block of the last of these.
    best = [{0: (0.0, 0)}]
    for stage in range(1, stages + 1):
        row: dict[int, tuple[float, int]] = {}
        for end in range(stage, count - (stages - stage) + 1):
            extra = head if stage == stages else 0.0
            row[end] = min(
                (max(best[-1][start][0], sums[end] - sums[start] + extra), -start)
                for start in range(stage - 1, end)
                if start in best[-1]
            )
        best.append(row)
    ends = [count]
    for stage in range(stages, 0, -1):
        ends.append(-best[stage][ends[-1]][1])
    ends.reverse()
    return [end - start for start, end in pairwise(ends)]


def stages_of_shared_params(
    model: nn.Module, stage_blocks: list[list[str]]
) -> dict[str, list[int]]:
    """Return the name of each table that several stages use -> those stages; each has a copy.

    These are the embeddings, what the blocks of a stack share, and a student's map of their outputs to a teacher's.
    """
    layout = stage_layout(model)
    assert layout is not None
    users: dict[int, set[int]] = {}
    names: dict[int, str] = {}
    for embed, stack in zip(layout.inputs, layout.stacks, strict=True):
        table = model.get_submodule(embed).table.weight  # type: ignore[union-attr]
        names.setdefault(id(table), f"{embed}.table.weight")
        users.setdefault(id(table), set()).add(stage_of(stage_blocks, stack))
    last = len(stage_blocks) - 1
    head = model.get_submodule("head").weight
    if id(head) in users:
        users[id(head)].add(last)
    if getattr(model, "mtp", None) is not None:
        # It looks tokens up behind the last block.
        users[id(model.get_submodule("embed").table.weight)].add(last)  # type: ignore[union-attr]
    for stack in layout.stacks:
        for number, paths in enumerate(stage_blocks):
            blocks = [model.get_submodule(path) for path in paths if path.startswith(f"{stack}.")]
            for name, parameter in params_shared_by_blocks(model.get_submodule(stack), blocks):
                names[id(parameter)] = f"{stack}.{name}"
                users.setdefault(id(parameter), set()).add(number)
    maps = getattr(model, "distillation", None)
    if maps is not None and maps.hidden is not None:
        names[id(maps.hidden.weight)] = "distillation.hidden.weight"
        users[id(maps.hidden.weight)] = set(range(len(stage_blocks)))
    return {names[key]: sorted(stages) for key, stages in users.items() if len(stages) > 1}


def params_shared_by_blocks(
    stack: nn.Module, blocks: Sequence[nn.Module]
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters, with their names, of the stack's shared parts that one of `blocks` uses.

    These are its position part, the tables of its attention cores and of the positions at the inputs of its blocks, and
    the sublayers that all blocks share.
    """
    assert isinstance(stack, Stack)
    sublayers = [
        sublayer
        for block in blocks
        if isinstance(block, Block)
        for sublayer in block.sublayers().values()
    ]
    positions = [
        block.position
        for block in blocks
        if isinstance(block, Block) and block.position is not None
    ]
    modules = [module for part in (*sublayers, *positions) for module in part.modules()]
    shared: list[tuple[str, nn.Parameter]] = []
    for part in stack.passes() if blocks else ():
        if part.used_by_all_blocks:
            shared += [
                (f"{part.key}.{name}", parameter) for name, parameter in part.named_parameters()
            ]
    for name, attribute, tables in (
        ("position", "position", stack.position),
        ("core_tables", "layer_tables", stack.core_tables),
        ("position_tables", "layer_tables", stack.position_tables),
    ):
        if tables is not None and any(vars(module).get(attribute) is tables for module in modules):
            shared += [
                (f"{name}.{parameter}", value) for parameter, value in tables.named_parameters()
            ]
    return shared


def stage_of(stage_blocks: list[list[str]], stack: str) -> int:
    """Return the stage in which a stack starts."""
    return next(stage for stage, paths in enumerate(stage_blocks) if f"{stack}.blocks.0" in paths)


def params_shared_across_stages(model: nn.Module, stage_blocks: list[list[str]]) -> list[str]:
    """Return the parameters that blocks of several stages share."""
    stage = {path: number for number, paths in enumerate(stage_blocks) for path in paths}
    seen: dict[int, tuple[str, int]] = {}
    shared = []
    for path, module in model.named_modules():
        at = next(
            (number for block, number in stage.items() if f"{path}.".startswith(f"{block}.")), None
        )
        if at is None or not isinstance(module, Module):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            first, where = seen.setdefault(id(parameter), (f"{path}.{name}", at))
            if where != at:
                shared.append(first)
    return sorted(set(shared))
