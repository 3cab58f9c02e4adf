"""What an evaluation drops: said where its loss is printed, since training drops by another capacity."""

from torch import nn

from xscale.nn.ffn.moe.moe import Moe


def capacity_notes(model: nn.Module) -> list[str]:
    """Return a sentence for each capacity of mixtures in evaluation, of a model whose training drops tokens."""
    configs = [module.config for module in model.modules() if isinstance(module, Moe)]
    factors = {config.eval_capacity_factor: None for config in configs if config.capacity_factor is not None}
    return [_note(factor) for factor in factors]


def _note(factor: float | None) -> str:
    if factor is None or factor == float("inf"):
        return "evaluation drops no tokens of the experts; training drops those over capacity_factor"
    return f"evaluation drops the tokens that exceed eval_capacity_factor={factor:g} in their sequence"
