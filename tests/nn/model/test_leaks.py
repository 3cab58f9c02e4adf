"""Whole decoders of every config, with noise on: no logit of a causal model depends on a later token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.made import NOISE, close
from tests.nn.moe.mixture import set_equal_counts
from xscale.core.compose import compose
from xscale.core.config import Config, decode, encode
from xscale.nn.attention.core import CORES
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.materialize import materialize
from xscale.nn.mixer.attention import Attention
from xscale.nn.model.embed import Embed
from xscale.nn.model.model import MODELS
from xscale.nn.module import name_modules
from xscale.nn.tokens import Tokens

CONFIGS = Path(__file__).parents[3] / "configs"
FILES = [*sorted(CONFIGS.glob("model/*.yaml")), *sorted(CONFIGS.glob("run/*.yaml"))]
VOCABULARY, LENGTH, SOURCE = 64, 96, 23
CUTS = (37, LENGTH - 1)
LARGEST = {"hidden": 48, "heads": 4, "kv_heads": 2, "experts": 16, "depth": 4} | dict.fromkeys(
    ("head_width", "rope_width", "value_width", "query_rank", "kv_rank"), 8
)
"""Key -> the most that it may be here."""
LEAKS = {
    "model/moe_base.yaml": "the balanced assignment of training looks at all tokens",
    "model/moe_gshard.yaml": "first choices take their places before second ones",
    "run/gshard_600b.yaml": "first choices take their places before second ones",
}
"""Config -> why its paper's routing depends on later tokens, which the config allows by `allow_noncausal_routing`."""
LEAK_IN_TRAINING_ONLY = {"model/moe_base.yaml"}


def config_of(file: Path) -> Config:
    """The model's config, with small sizes and all noise on."""
    return decoded(noisy(small(encode(decoded(compose(file, []).data["model"]))) | {"width": 32}))


def decoded(data: dict[str, Any]) -> Config:
    schema = MODELS.get(data["kind"]).part.Config
    return decode(schema, {key: value for key, value in data.items() if key != "kind"})


def small(data: Any) -> Any:
    if isinstance(data, dict):
        return {
            key: min(value, LARGEST[key]) if key in LARGEST and isinstance(value, int) else small(value)
            for key, value in data.items()
        }
    return [small(value) for value in data] if isinstance(data, list | tuple) else data


def noisy(data: Any, drops: bool = True) -> Any:
    """The config with its fields of noise switched on; `drops`: whether it can drop, as all but some cores can."""
    if isinstance(data, dict):
        if "core" in data:
            core = decode(Attention.Config, {"core": data["core"]}).core
            drops = CORES.of(core).part.traits_of(core).dropout
        noise = {key: value for key, value in NOISE.items() if key in data and (drops or key != "dropout")}
        return {key: noisy(value) for key, value in data.items()} | noise
    return [noisy(value) for value in data] if isinstance(data, list | tuple) else data


def built(config: Config) -> nn.Module:
    entry = MODELS.of(config)
    assert entry.part.check(config, (VOCABULARY, LENGTH), "model") == []
    with torch.device("meta"):
        model: nn.Module = entry.part(config, VOCABULARY, LENGTH)
    name_modules(model)
    materialize(model, 0, dtype=torch.float64)
    set_equal_counts(model, VOCABULARY)
    return model


def logits(model: nn.Module, ids: Tensor, source: Tokens | None) -> Tensor:
    torch.manual_seed(0)
    out: Tensor = model(Tokens.from_ids(ids, rng_seed=1 if model.training else None), source=source)
    return out


def depends_on_later_tokens(model: nn.Module, source: Tokens | None) -> bool:
    """A leak shows by other tokens behind a cut, and by the gradient of the logits before it with respect to the
    embeddings."""
    # One sequence: where experts have a capacity, the tokens of a sequence come before those of the next.
    ids = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    embedded: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, out: Tensor) -> None:
        if out.shape[1] >= LENGTH:
            embedded.append(out)

    hooks = [module.register_forward_hook(keep) for module in model.modules() if isinstance(module, Embed)]
    whole = logits(model, ids, source)
    for hook in hooks:
        hook.remove()
    first = embedded[-1].shape[1] - LENGTH  # Global tokens come before the text.
    leaks = False
    for cut in CUTS:
        (gradient,) = torch.autograd.grad(whole[:, :cut].square().sum(), embedded[-1], retain_graph=True)
        leaks |= bool(gradient[:, first + cut :].any())
        changed = logits(model, torch.cat((ids[:, :cut], (ids[:, cut:] + 7) % VOCABULARY), 1), source)
        assert not close(changed[:, cut:], whole[:, cut:]), "the model does not look at its input"
        leaks |= not close(changed[:, :cut], whole[:, :cut])
    return leaks


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_decoder_knows_no_later_token(file: Path) -> None:
    config = config_of(file)
    if not MODELS.of(config).traits.causal:
        return
    model, name = built(config), f"{file.parent.name}/{file.name}"
    noncausal = [
        module for module in model.modules() if isinstance(module, Moe) and module.config.allow_noncausal_routing
    ]
    assert bool(noncausal) == (name in LEAKS), "allow_noncausal_routing has a reason in LEAKS, or is false"
    source = None
    if MODELS.of(config).traits.source:
        source = Tokens.from_ids(torch.randint(VOCABULARY, (1, SOURCE), generator=torch.Generator().manual_seed(1)))
    for training in (False, True):
        if name in LEAKS and (training or name not in LEAK_IN_TRAINING_ONLY):
            continue
        model.train(training)
        assert not depends_on_later_tokens(model, source), f"it does {'in training' if training else 'in evaluation'}"


def test_routing_by_later_tokens_is_seen() -> None:
    """The negative control: capacity by the order of choices, in evaluation and in training."""
    data = encode(config_of(CONFIGS / "model/moe_glam.yaml"))
    rule = data["stack"]["rules"][0]
    rule["ffn"] |= {"drop_policy": "choice", "allow_noncausal_routing": True}
    rule["ffn"] |= {"capacity_factor": 0.5, "eval_capacity_factor": 0.5}
    model = built(decoded(data))
    for training in (False, True):
        assert depends_on_later_tokens(model.train(training), None)
