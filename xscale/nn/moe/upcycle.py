"""Komatsuzaki et al. 2023, sparse upcycling: the weights of a dense model become those of a mixture of experts."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from xscale.core.errors import ConfigError
from xscale.nn.ffn.moe import Moe
from xscale.nn.init import draw
from xscale.nn.module import parameter_inits
from xscale.nn.moe.router.topk import TopK


def upcycle(model: nn.Module, dense: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Weights by name for `model` (its mixtures may be on meta) from those of the dense model it grows out of.

    Each expert is a copy of the dense ffn; routers are drawn from `seed`. Where experts have 1/g of the dense hidden
    width, g experts in turn hold its g pieces and share one router row, so that a token which chooses one of them
    chooses all (He et al. 2024, virtual groups), and their output maps are scaled to make up for weights that sum to
    one. Shared ffns start as the dense model has them if it has them; else their last map is zero.

    The loss continues where the dense model's stood if nothing is dropped, the router is `topk` with `normalise`, and
    top_k is a multiple of g (`departures`). ConfigError if a weight is missing or does not fit.
    """
    weights: dict[str, Tensor] = {}
    # A mixture that is there already stays as it is.
    mixtures = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, Moe) and f"{path}.experts.up" not in dense
    }
    for path, moe in mixtures.items():
        weights |= _experts(path, moe, dense)
    for name, parameter, init in parameter_inits(model):
        if name in weights:
            continue
        if name in dense:
            if dense[name].shape != parameter.shape:
                raise _misfit(name, dense[name], tuple(parameter.shape))
            weights[name] = dense[name].clone()
            continue
        path = next((one for one in mixtures if name.startswith(f"{one}.")), None)
        if path is None:
            raise ConfigError(name, "the dense checkpoint has no such weight", "Only ffns may differ from it.")
        rest = name[len(path) + 1 :]
        drawn = draw(init, tuple(parameter.shape), seed, name)
        if rest in ("router.weight", "router.noise"):
            pieces = _pieces(path, mixtures[path], dense)
            drawn = drawn[::pieces].repeat_interleave(pieces, dim=0)
        elif rest.startswith("shared.down."):
            drawn = torch.zeros_like(drawn)
        weights[name] = drawn.to(next(iter(dense.values())).dtype)
    _check_all_used(dense, model, mixtures)
    return weights


def _check_all_used(dense: Mapping[str, Tensor], model: nn.Module, mixtures: Mapping[str, Moe]) -> None:
    """ConfigError for a dense weight that went nowhere: the experts would lack a gate or a bias, the model a block."""
    # A tied weight goes by two names.
    used = set(model.state_dict())
    for path, moe in mixtures.items():
        for name, _ in moe.experts.named_parameters():
            used.add(f"{path}.{name.removesuffix('_bias')}.{'bias' if name.endswith('_bias') else 'weight'}")
    for name in dense:
        if name not in used:
            raise ConfigError(
                name, "nothing in the mixture comes of this dense weight", "Only ffns may differ from it."
            )


def departures(moe: Moe, dense_hidden: int) -> list[str]:
    """Why `upcycle` does not leave the output of this mixture what the dense ffn's of that hidden width was; empty
    when it does."""
    config, pieces = moe.config, dense_hidden // moe.experts.up.shape[1]
    router = config.router
    found = []
    if not isinstance(router, TopK.Config):
        found.append(f"the weights that the router {router.kind} gives a token do not sum to 1; those of topk do")
    else:
        if not router.normalise or router.scale != 1:
            found.append("the weights do not sum to 1 without normalise: true and scale: 1")
        if router.top_k % pieces:
            found.append(f"top_k {router.top_k} is not a multiple of the {pieces} experts that make up one dense ffn")
        per_group = moe.config.experts // getattr(router, "expert_groups", 1)
        if per_group % pieces:
            found.append(f"the {pieces} experts that make up one dense ffn are not in one group of {per_group}")
    if config.capacity_factor is not None:
        found.append("capacity_factor drops tokens")
    if config.mix == "softmax":
        found.append("mix: softmax shares out what the experts had alone")
    return found


def _pieces(path: str, moe: Moe, dense: Mapping[str, Tensor]) -> int:
    """g: experts that together hold one dense ffn."""
    up = dense.get(f"{path}.up.weight")
    if up is None:
        raise ConfigError(
            f"{path}.up.weight", "the dense checkpoint has no such weight", "Upcycle dense or gated ffns."
        )
    experts, hidden, width = moe.experts.up.shape
    pieces = up.shape[0] // hidden
    if up.shape[1] != width or up.shape[0] % hidden or experts % max(pieces, 1):
        fix = f"Take experts of hidden {up.shape[0]}, or a part of it of which the experts are a multiple."
        what = f"{experts} experts of hidden {hidden} cannot be made of a dense ffn {[*up.shape]}"
        raise ConfigError(path, what, fix)
    return pieces


def _experts(path: str, moe: Moe, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    pieces = _pieces(path, moe, dense)
    weights: dict[str, Tensor] = {}
    for name, parameter in moe.experts.named_parameters():
        kind = name.removesuffix("_bias")
        source = f"{path}.{kind}.{'bias' if name.endswith('_bias') else 'weight'}"
        if source not in dense:
            raise ConfigError(
                source, "the dense checkpoint has no such weight", "The experts must be of its ffn's kind."
            )
        value = dense[source]
        if name == "down":
            stacked = torch.stack(value.chunk(pieces, dim=1)) * pieces  # [g, D, F / g]
        elif name == "down_bias":
            # Each of the g pieces adds it once, with weights that sum to one.
            stacked = value.expand(pieces, -1)
        else:
            stacked = torch.stack(value.chunk(pieces, dim=0))
        full = stacked.repeat(len(parameter) // pieces, *[1] * (stacked.dim() - 1))
        if full.shape != parameter.shape:
            raise _misfit(source, value, tuple(parameter.shape))
        weights[f"{path}.experts.{name}"] = full.contiguous()
    return weights


def _misfit(name: str, value: Tensor, shape: tuple[int, ...]) -> ConfigError:
    return ConfigError(name, f"the dense weight is {[*value.shape]}, which does not make {[*shape]}")
