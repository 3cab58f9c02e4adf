"""Tensor parallelism (Shoeybi et al. 2019): heads, ffn hidden units and the vocabulary are sharded over tp.

Each sublayer's part whose parameters tp shards is a region (see `region`); embedding and head are vocabulary-parallel.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from xscale.core.errors import Problem
from xscale.core.requirements import divisors, divisors_of, instead, take
from xscale.mesh.mesh import Mesh
from xscale.nn.blocks.stack import Stack
from xscale.nn.head.head import Head
from xscale.nn.module import Module, parameter_axes
from xscale.nn.roles import Role
from xscale.parallel.config import ParallelConfig
from xscale.parallel.recompute.activation_checkpointing import is_recomputed
from xscale.parallel.roles import apply_table, seams_in
from xscale.parallel.shard.region import TensorRegion
from xscale.parallel.shard.sharding import RULES, dense_mesh
from xscale.parallel.tensor import sequence
from xscale.parallel.tensor.table import TENSOR


def check(model: nn.Module, config: ParallelConfig, path: str) -> list[Problem]:
    """Return what of a model tp cannot shard, or not evenly."""
    tp = config.mesh.tp
    if tp == 1:
        return []
    where = f"{path}.mesh.tp"
    problems = _check_sizes(model, config, where)
    modules = [module for module in model.modules() if isinstance(module, Module)]
    own_problems = {module: module.tp_problems(tp, where) for module in modules}
    parts = [getattr(module, seam) for module, seam, _ in seams_in(modules, Role.REGION)]
    for part in (*parts, *(part for module in modules for part in module.summed_parts)):
        # A part that says itself why it cannot be sharded needs no other reason.
        if not any(own_problems.get(module) for module in part.modules()):
            problems += _check_part(part, where)
    problems += [
        problem for problems_of_module in own_problems.values() for problem in problems_of_module
    ]
    for mixer, *_ in seams_in(model.modules(), Role.FIRST_HEAD):
        for key, count in mixer.head_counts.items():
            problems += _check_divides(count, tp, where, key)
    if config.tensor.sequence:
        problems += sequence.check(model, f"{path}.tensor.sequence")
    return list({problem.what: problem for problem in problems}.values())


def _check_sizes(model: nn.Module, config: ParallelConfig, where: str) -> list[Problem]:
    problems, tp = [], config.mesh.tp
    axes = parameter_axes(model)
    for name, parameter in model.named_parameters():
        for axis, size in zip(axes[name], parameter.shape, strict=True):
            is_sharded = config.mesh.tp_in_experts or "experts" not in axes[name]
            if axis == "ffn" and is_sharded and size % tp:
                what = f"tp={tp} does not divide the ffn's hidden width of {size}"
                fix = f"Or take a hidden width that {tp} divides, such as {-(-size // tp) * tp}."
                lower = take(*[degree for degree in divisors_of(size) if degree < tp])
                problems.append(Problem(where, what, fix, choices=lower))
            if axis == "vocab" and size <= (tp - 1) * -(-size // tp):
                what = f"vocabulary of {size} leaves some of tp={tp} ranks with no rows"
                lower = take(
                    *[degree for degree in range(1, tp) if size > (degree - 1) * -(-size // degree)]
                )
                problems.append(Problem(where, what, "Or take a larger vocabulary.", choices=lower))
    return problems


def _check_part(part: nn.Module, where: str) -> list[Problem]:
    assert isinstance(part, Module)
    modules = [module for module in part.modules() if isinstance(module, Module)]
    if any(
        RULES.get(axis) == "tp"
        for module in modules
        for axes in module.axes.values()
        for axis in axes
    ):
        return []
    kind = getattr(getattr(part, "Config", None), "kind", type(part).__name__)
    what = f"'{kind}' has neither heads nor hidden units that tp could shard"
    mixers_or_ffns = instead("mixer", kind, ["attention"]) + instead(
        "ffn", kind, ["dense", "gated", "moe"]
    )
    return [Problem(where, what, choices=take(1) + mixers_or_ffns)]


def _check_divides(heads: int, tp: int, where: str, key: str = "heads") -> list[Problem]:
    if heads % tp == 0:
        return []
    return [Problem(where, f"tp={tp} does not divide {key}={heads}", choices=divisors(heads))]


SENT: dict[Role, tuple[str, Callable[[Any, int, int, bool], float]]] = {
    Role.REGION: (
        "regions",
        lambda module, width, tp, sequence_parallel: 2 * (tp - 1) / tp * width,
    ),
    Role.SUM_OVER_HEADS: (
        "regions",
        lambda module, width, tp, _: 2 * (tp - 1) / tp * module.summed_channels,
    ),
    Role.NORM_OVER_HEADS: (
        "regions",
        lambda module, width, tp, _: (tp - 1) / tp * module.gathered_channels,
    ),
    Role.EMBEDDING: (
        "vocabulary",
        lambda module, width, tp, sequence_parallel: 2 * (tp - 1) / tp * width,
    ),
    # The loss sends two numbers a token to every other rank, and no logits.
    Role.VOCABULARY_LOSS: (
        "vocabulary",
        lambda module, width, tp, sequence_parallel: (
            (tp - 1) / tp * width * sequence_parallel + 2 * (tp - 1)
        ),
    ),
}
"""Role -> what its elements are counted as, and those that a rank sends for a token: of (module, width, tp, sp)."""


def estimate(
    model: nn.Module, config: ParallelConfig, length: int, source: int = 0
) -> dict[str, float]:
    """Estimate the elements a rank sends over tp in the forward of one sequence, by sender; backward sends as many.

    `length` and `source` are the lengths of the two sequences. An all-reduce sends each element twice, except a rank's
    own 1/tp; sequence parallelism sends it once into a region (all-gather) and once out of it (reduce-scatter).
    """
    tp, sequence_parallel = config.mesh.tp, config.tensor.sequence
    sent = {"regions": 0.0, "vocabulary": 0.0}
    if tp == 1:
        return sent
    width = next(module.width for module in model.modules() if isinstance(module, Head))
    pooled = {
        f"{path}.blocks.{layer}.": fraction
        for path, stack in model.named_modules()
        if isinstance(stack, Stack)
        for layer, (fraction, _) in enumerate(stack.token_fractions())
    }
    paths = {module: path for path, module in model.named_modules()}
    for module, seam, role in seams_in(model.modules(), *SENT):
        path = paths[module]
        tokens: float = source if path.split(".")[0] in ("encoder", "source") else length
        tokens *= next(
            (fraction for prefix, fraction in pooled.items() if path.startswith(prefix)), 1.0
        )
        kind, elements = SENT[role]
        sent[kind] += elements(module, width, tp, sequence_parallel) * tokens
        if (
            role is Role.REGION
            and sequence_parallel
            and getattr(getattr(module, seam), "cross", False)
        ):
            # The other sequence enters the region too.
            sent[kind] += (tp - 1) / tp * width * source
    return sent


def replicated_parameters(model: nn.Module, tp: int) -> set[str]:
    """Return parameters that tp replicates although the table shards them: projections to fewer kv_heads than tp."""
    return {
        f"{getattr(module, seam).path}.{name}"
        for module, seam, _ in seams_in(model.modules(), Role.KV_PROJECTION)
        if module.kv_heads < tp
        for name in getattr(module, seam).axes
    }


def apply(model: nn.Module, mesh: Mesh, config: ParallelConfig) -> None:
    """Do at each seam of a sharded model what the tables say of its role. `precision` comes first."""
    if mesh.degrees.tp == 1:
        return
    recompute = config.recompute
    region = TensorRegion(
        dense_mesh(mesh, config)["tp"].get_group(),
        config.tensor.sequence,
        experts_replicated=mesh.degrees.expert_tp == 1,
        regathers=lambda path: (
            recompute.regather_sequence_parallel_input and not is_recomputed(path, recompute)
        ),
    )
    apply_table(TENSOR | sequence.SEQUENCE if region.sequence else TENSOR, model.modules(), region)
