"""Checks of the config of an attention mixer, of the core that it holds and of its position encoding."""

from dataclasses import replace
from typing import Any, ClassVar

from xscale.core.choices import Choice
from xscale.core.errors import Problem
from xscale.core.requirements import kinds, must_divide, take
from xscale.nn.attention.core import CORES, Core
from xscale.nn.dims import Dims
from xscale.nn.mixer.attention_heads import AttentionHeads
from xscale.nn.position.position import POSITIONS


class AttentionChecks(AttentionHeads):
    """An attention mixer whose config, core and position encoding are checked against the model."""

    holds_core = True
    heads_make_width = True
    cores: ClassVar[tuple[str, ...] | None] = None
    """Kinds of the cores that the mixer can hold; None: any."""

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        groups = getattr(config, "kv_heads", None) or config.heads
        problems += must_divide(path, "kv_heads", groups, "heads", config.heads)
        if cls._shares_qk(config, dims) and (dims.cross or groups != config.heads):
            what = (
                "cross attention has separate queries and keys"
                if dims.cross
                else "needs kv_heads equal to heads"
            )
            kv_heads = () if dims.cross else take(config.heads, None, key=f"{path}.kv_heads")
            fix = ""
            if config.shared_qk is None:
                what = f"core '{config.core.kind}' shares queries and keys, which {what}"
                fix = "Separate queries and keys are not those of its paper."
            problems.append(Problem(f"{path}.shared_qk", what, fix, choices=kv_heads + take(False)))
        return (
            problems + cls.check_position(config, dims, path) + cls._check_core(config, dims, path)
        )

    @classmethod
    def score_heads(cls, config: Any) -> int | None:
        return (
            config.heads
            if CORES.of(config.core).part.traits_of(config.core).previous_scores
            else None
        )

    @classmethod
    def reads_scores(cls, config: Any) -> bool:
        return bool(CORES.of(config.core).part.reads_scores(config.core))

    @classmethod
    def check_position(cls, config: Any, dims: Dims, path: str) -> list[Problem]:
        """List the problems of the position encoding of the mixer's own."""
        if config.position is None:
            return []
        entry = POSITIONS.of(config.position)
        problems = list(entry.part.check(config.position, dims, f"{path}.position"))
        if entry.traits.where == "input":
            what = f"'{entry.name}' acts on the embeddings, and a mixer has none"
            able = [other.name for other in POSITIONS if other.traits.where != "input"]
            choices = kinds(able, f"{path}.position") + take(None)
            problems.append(Problem(f"{path}.position", what, choices=choices))
        return problems

    @classmethod
    def check_projections(
        cls, config: Any, path: str, why: str, alternatives: tuple[Choice, ...]
    ) -> list[Problem]:
        """List the keys that a mixer with further projections of its own, or of global tokens, cannot have."""
        settings = (
            ("kv_heads", (None, config.heads)),
            ("shared_qk", (None, False)),
            ("qk_norm", (None,)),
        )
        return [
            Problem(f"{path}.{key}", why, choices=take(None) + alternatives)
            for key, allowed in settings
            if getattr(config, key) not in allowed
        ]

    @classmethod
    def _shares_qk(cls, config: Any, dims: Dims) -> bool:
        if config.shared_qk is not None:
            return bool(config.shared_qk)
        return not dims.cross and CORES.of(config.core).part.shares_qk(config.core)

    @classmethod
    def _check_core(cls, config: Any, dims: Dims, path: str) -> list[Problem]:
        entry = CORES.of(config.core)
        if cls.cores is not None and entry.name not in cls.cores:
            what = f"mixer '{cls.Config.kind}' cannot hold the core '{entry.name}'"
            choices = kinds(cls.cores, f"{path}.core") + take("attention", key=f"{path}.kind")
            return [Problem(f"{path}.core", what, choices=choices)]
        core = config.core
        if entry.part.set_by_mixer is not None and entry.part.set_by_mixer[2] == cls.Config.kind:
            key = entry.part.set_by_mixer[0]
            core = core.model_copy(update={key: type(core).model_fields[key].default})
        placed = replace(dims, position=config.position or dims.position)
        problems = list(entry.part.check(core, placed, f"{path}.core"))
        problems += entry.part.check_heads(config.core, config.heads, f"{path}.core")
        head_width = getattr(config, "head_width", None) or dims.width // config.heads
        for core, core_path in entry.part.parts(config.core, f"{path}.core"):
            problems += CORES.of(core).part.check_head_width(core, head_width, core_path)
            problems += check_core_traits(core, config, dims, path, core_path)
        return problems


def check_core_traits(
    core: Core.Config, config: Any, dims: Dims, path: str, core_path: str
) -> list[Problem]:
    """List what the model asks of a core of the mixer at `path` that the core cannot do."""
    entry = CORES.of(core)
    able, wanted = entry.traits, []
    if dims.cross and not able.cross:
        wanted.append(("cross", "cannot do cross attention"))
    elif dims.causal and not dims.cross and not able.causal:
        wanted.append(("causal", "is not causal, and this model is"))
    elif not dims.causal and not able.bidirectional:
        wanted.append(("bidirectional", "is not bidirectional, and this model is"))
    position = config.position or dims.position
    if position is not None and not dims.cross:
        where = POSITIONS.of(position).traits.where
        if where == "bias" and not able.bias:
            wanted.append(
                ("bias", f"takes no bias on the scores, and position '{position.kind}' adds one")
            )
        if where == "scores" and not able.position_terms:
            wanted.append(
                ("position_terms", f"has no scores for position '{position.kind}' to add terms to")
            )
    if config.dropout and not able.dropout:
        wanted.append(
            ("dropout", f"has no attention weights to drop, and {path}.dropout is {config.dropout}")
        )
    problems = []
    for trait, what in wanted:
        choices = kinds(CORES.able(**{trait: True}), core_path)
        if trait == "dropout":
            choices += take(0.0, key=f"{path}.dropout")
        problems.append(Problem(core_path, f"'{entry.name}' {what}", choices=choices))
    return problems
