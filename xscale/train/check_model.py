"""Check what a model on meta cannot be in a run: frozen stages of exits, LoRA, padding, packed documents, a prefix."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from xscale.core.errors import Problem
from xscale.core.registry import Family
from xscale.mesh.axes import MeshConfig
from xscale.nn.attention.core import CORES, Core
from xscale.nn.exits import Exits
from xscale.nn.ffn.sparse import SparseFfn
from xscale.nn.linear import Linear
from xscale.nn.lora import LoraConfig, lora_paths
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import MIXERS, Mixer
from xscale.nn.model.embed import global_tokens_of
from xscale.nn.module import Module, Part
from xscale.nn.stack import Stack
from xscale.objective.objective import ObjectiveTraits
from xscale.optim.groups import ParameterGroup, group_of, nearest_patterns
from xscale.parallel import context
from xscale.parallel.config import ParallelConfig


def check_two_stage(model: nn.Module, groups: Sequence[ParameterGroup], names: Sequence[str]) -> list[Problem]:
    """Check that the parameters which a stage of the training of exits does not train are frozen in it."""
    stages = [module.config.two_stage for module in model.modules() if isinstance(module, Exits)]
    if not stages or stages[0] is None:
        return []
    change = stages[0]
    for name in names:
        index = group_of(name, groups)
        frozen = (0.0, 1.0) if index is None else (groups[index].since, groups[index].until)
        if frozen != ((change, 1.0) if ".exits." in name else (0.0, change)):
            what = f"with exits.two_stage={change:g} each stage freezes the exits or all else, and {name} is not frozen"
            fix = f"Take [{{match: '*.exits.*', since: {change:g}}}, {{match: '*', until: {change:g}}}]."
            return [Problem("optimizer.groups", what, fix)]
    return []


def check_lora(model: nn.Module, config: LoraConfig, mesh: MeshConfig) -> list[Problem]:
    """List the patterns of LoRA that match no linear map, and the maps that it cannot be added to."""
    maps = [path for path, module in model.named_modules() if isinstance(module, Linear)]
    problems: list[Problem] = []
    tp = mesh.tp
    if config.dropout and mesh.cp > 1:
        what = "draws over the sequence, of which each rank of cp has a shard"
        problems.append(Problem("lora.dropout", what, "Take 0, or cp=1."))
    for index, pattern in enumerate(config.match):
        where, paths = f"lora.match.{index}", lora_paths(model, pattern)
        if not paths:
            what = f"no linear map has a path that matches '{pattern}'"
            problems.append(Problem(where, what, f"The nearest are {', '.join(nearest_patterns(pattern, maps))}."))
        for path in paths:
            parent = model.get_submodule(path.rpartition(".")[0])
            if isinstance(parent, SparseFfn):
                what = f"{path} is read by blocks, to which LoRA adds nothing"
                problems.append(Problem(where, what, "Leave it out, or take an ffn of kind dense or gated."))
            linear = model.get_submodule(path)
            fewer = isinstance(parent, Attention) and parent.key_channels // parent.head_width < tp
            if fewer and isinstance(linear, Linear) and "kv_heads" in linear.axes["weight"]:
                what = f"tp={tp} replicates {path}, which has fewer kv_heads than ranks"
                problems.append(Problem(where, what, "Leave it out, or take a lower tp."))
            sharded = isinstance(linear, Linear) and linear.axes["weight"][1] not in ("width", "state")
            if config.dropout and tp > 1 and sharded:
                what = f"{path} reads channels that tp={tp} shards, of which no rank draws the whole mask"
                problems.append(Problem("lora.dropout", what, "Take 0 or tp=1, or leave it out of lora.match."))
            if path.startswith("head."):
                what = f"{path} is of the head, which is trained as a whole or not at all"
                problems.append(Problem(where, what, "Leave it out."))
    return list({problem.path: problem for problem in problems}.values())


def check_exits(model: nn.Module) -> list[Problem]:
    """List the heads that would predict tokens beside a head of classes."""
    if not any(isinstance(module, Exits) for module in model.modules()):
        return []
    what = "the heads of exits predict tokens, and the objective's labels are classes or scores of examples"
    return [Problem("model.stack.exits", what, "Take null, or an objective on tokens.")]


def check_multi_token(model: nn.Module) -> list[Problem]:
    """List the modules of multi-token prediction that would predict tokens beside a head of classes."""
    if getattr(model, "mtp", None) is None:
        return []
    what = "multi-token prediction predicts tokens, and the objective's labels are classes or scores of examples"
    return [Problem("model.mtp", what, "Take null, or an objective on tokens.")]


def check_pooling(model: nn.Module, traits: ObjectiveTraits, *, packed_documents: bool) -> list[Problem]:
    """List why an objective of these traits cannot train a stack that shortens its sequence. `packed_documents`: the
    documents of a sample must not see each other."""
    stacks = {path: module for path, module in model.named_modules() if isinstance(module, Stack) and module.pooling}
    problems = []
    for path, stack in stacks.items():
        if packed_documents and traits.samples == "packed":
            what = f"the windows of model.{path}.pooling begin at every second token, wherever a document begins"
            problems.append(Problem("data.cross_documents", what, f"Set it to true, or model.{path}.pooling=null."))
        assert stack.pooling is not None
        predicts_tokens = traits.labels not in ("class", "score") and stack.repeats_pooled
        if predicts_tokens and not stack.pooling.config.decoder_blocks:
            what = "the objective predicts at every token, and the tokens of a window have one state"
            fix = "Take 2 or more, which read the full sequence, or an objective on classes or scores."
            problems.append(Problem(f"model.{path}.pooling.decoder_blocks", what, fix))
    return problems


def check_samples(model: nn.Module, traits: ObjectiveTraits | None, *, cross_documents: bool) -> list[Problem]:
    """List what the model cannot do with the documents and the padding of samples; traits None: not known."""
    if traits is None:
        return [] if cross_documents else check_documents(model)
    problems = []
    if traits.samples != "packed":
        problems += check_padded_samples(model)
    elif traits.padded or not cross_documents:
        problems += check_documents(model, traits.padded and cross_documents)
    problems += check_pooling(model, traits, packed_documents=not cross_documents)
    if traits.padded or traits.samples != "packed":
        problems += check_padding(model, is_marked=not traits.padded)
    return problems


def check_padding(model: nn.Module, is_marked: bool = False) -> list[Problem]:
    """List the parts for which padding would count; `is_marked`: `Tokens.padding` tells it from text."""
    paths: dict[str, str] = {}
    for path, module in model.named_modules():
        averages = isinstance(module, Module) and module.averages_tokens and not (is_marked and module.averages_text)
        if averages or (not is_marked and isinstance(module, Core) and module.traits.running_stats):
            paths.setdefault(type(module).__name__, path)
    return [
        Problem(
            f"model ({path})",
            f"in {name} the tokens of a micro-batch compete or are averaged, and padding would be among them",
            "Take a part whose output for a token depends on its document alone, or an objective on packed text.",
        )
        for name, path in paths.items()
    ]


def check_padded_samples(model: nn.Module) -> list[Problem]:
    """List the mixers for which the padding at the end of pairs and of labelled examples would be text.

    Causal order hides it; so do mixers that mask documents. A core that cannot is called without it.
    """
    mixers = [module for module in model.modules() if isinstance(module, Mixer) and module.Config.kind is not None]
    kinds = {str(mixer.Config.kind) for mixer in mixers}
    shown = [
        kind
        for kind in sorted(kinds)
        if not ((traits := MIXERS.get(kind).traits).documents or traits.padding or not traits.bidirectional)
    ]
    able = [entry.name for entry in MIXERS if entry.traits.documents or entry.traits.padding]
    return [
        Problem("objective", f"mixer '{kind}' cannot hide the padding of a sample", f"These can: {', '.join(able)}.")
        for kind in shown
    ]


def check_prefix(model: nn.Module, config: ParallelConfig) -> list[Problem]:
    """List the parts and the layout of a causal model that hide a prefix's later tokens from its earlier ones."""
    problems = [_hides_prefix(module, config) for module in model.modules() if isinstance(module, Mixer)]
    return list({str(problem): problem for problem in problems if problem is not None}.values())


def _hides_prefix(mixer: Mixer, config: ParallelConfig) -> Problem | None:
    hidden, kind = "of a prefix would not see its later tokens", str(mixer.Config.kind)
    if not MIXERS.get(kind).traits.prefix:
        fix = f"Take one of these mixers: {', '.join(MIXERS.able(prefix=True))}; or objective.kind=causal."
        return Problem("objective", f"in mixer '{kind}' the tokens {hidden}", fix)
    assert isinstance(mixer, Attention), "the trait is of mixers with a core"
    core, position = mixer.core.Config.kind, mixer.position
    if not mixer.core.traits.prefix:
        fix = f"Take one of these cores: {', '.join(CORES.able(prefix=True))}; or objective.kind=causal."
        return Problem("objective", f"in core '{core}' the tokens {hidden}", fix)
    if position is not None and (position.adds_bias or position.adds_scores):
        what = f"position '{position.Config.kind}' of a causal model tells no distances to later tokens from each other"
        return Problem("model.position", what, "Take rope, learned or sinusoidal; or objective.kind=causal.")
    if config.mesh.cp > 1 and context.style_of(mixer, config) in ("ring", "scan", "halo"):
        what = "a prefix is seen by tokens of earlier shards, whose scores are computed by ulysses alone"
        return Problem("parallel.context.style", what, "Take ulysses, or cp=1.")
    return None


def check_documents(model: nn.Module, only_padding: bool = False) -> list[Problem]:
    """List the mixers and cores that cannot mask the documents of a sample from each other, or its padding."""
    path, hidden = "data.cross_documents", "mask the documents of a sample from each other"
    other = f"Take {path}=true"
    if only_padding:
        path, hidden, other = "objective", "mask the padding of a sample", "Take an objective without padding"
    kinds: dict[str, list[str]] = {}
    for module in model.modules():
        parts: list[Part] = [module] if isinstance(module, Mixer) else []
        if isinstance(module, Attention):
            parts = [core for core, _ in module.core.head_cores(module.query_channels // module.head_width)]
        family: Family[Any] = CORES if isinstance(module, Attention) else MIXERS
        for part in parts:
            if part.Config.kind is not None and not family.get(part.Config.kind).traits.documents:
                kinds[f"{family.name} '{part.Config.kind}'"] = family.able(documents=True)
    problems = [
        Problem(
            path,
            f"{kind} cannot {hidden}",
            f"{other}, or one of: {', '.join(able)}.",
        )
        for kind, able in kinds.items()
    ]
    if count := global_tokens_of(model):
        what = f"the {count} global tokens of a sample are shared by its documents, which must not see each other"
        problems.append(Problem(path, what, f"{other}, or model.global_tokens=0."))
    return problems
