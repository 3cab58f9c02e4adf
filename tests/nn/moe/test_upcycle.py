"""A dense model's weights become a mixture's, and where the mathematics allows it the output stays the same."""

import pytest
import torch

from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.ffn.moe.upcycle import upcycle, why_output_changes
from xscale.nn.materialize import materialize
from xscale.nn.model.decoder import Decoder
from xscale.nn.tokens import Tokens

IDS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


def model(**ffn: object) -> Decoder:
    """Two layers; the second has the given ffn."""
    rules = ({"every": 2, "at": 1, "ffn": ffn},) if ffn else ()
    block = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "gated", "hidden": 24, "bias": True}}
    config = decode(
        Decoder.Config, {"width": 16, "init_std": 0.3, "stack": {"depth": 2, "block": block, "rules": rules}}
    )
    with torch.device("meta"):
        return Decoder(config, 50, 16)


def dense() -> Decoder:
    one = model()
    materialize(one, 3, dtype=torch.float64)
    for name, parameter in one.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return one


def moe(hidden: int, **others: object) -> Decoder:
    return model(**{"kind": "moe", "expert": {"kind": "gated", "hidden": hidden, "bias": True}, **others})


def both() -> Decoder:
    """Both layers are mixtures."""
    ffn = {"kind": "moe", "experts": 4, "expert": {"kind": "gated", "hidden": 24, "bias": True}}
    block = {"mixer": {"kind": "attention", "heads": 2}, "ffn": ffn}
    config = decode(Decoder.Config, {"width": 16, "init_std": 0.3, "stack": {"depth": 2, "block": block}})
    with torch.device("meta"):
        return Decoder(config, 50, 16)


@pytest.mark.parametrize(
    ("hidden", "others", "same"),
    [
        (24, {"experts": 4}, True),
        (24, {"experts": 4, "shared": {"kind": "gated", "hidden": 8}}, True),
        (8, {"experts": 12, "router": {"kind": "topk", "top_k": 6}}, True),
        (8, {"experts": 12, "router": {"kind": "topk", "top_k": 2}}, False),
        (24, {"experts": 4, "router": "switch"}, False),
        (24, {"experts": 4, "capacity_factor": 1.0}, False),
    ],
)
def test_output_continues(hidden: int, others: dict[str, object], same: bool) -> None:
    old, new = dense(), moe(hidden, **others)
    assert (not why_output_changes(new.stack.blocks["1"].ffn.part, 24)) == same
    weights = upcycle(new, old.state_dict(), 1)
    materialize(new, 0, dtype=torch.float64)
    assert not new.load_state_dict(weights, strict=False).unexpected_keys
    difference = (new(Tokens.from_ids(IDS)) - old(Tokens.from_ids(IDS))).abs().max().item()
    assert (difference < 1e-12) == same


def test_experts_are_copies_and_routers_are_drawn() -> None:
    old, new = dense(), moe(24, experts=4)
    weights = upcycle(new, old.state_dict(), 1)
    assert set(weights) == {name for name, _ in new.named_parameters()}
    path = "stack.blocks.1.ffn.part"
    for expert in range(4):
        assert torch.equal(weights[f"{path}.experts.down"][expert], old.state_dict()[f"{path}.down.weight"])
    assert weights[f"{path}.router.weight"].std() > 0
    assert weights[f"{path}.router.weight"].dtype == torch.float64


def test_a_mixture_that_is_there_stays() -> None:
    old = moe(24, experts=4)
    materialize(old, 3, dtype=torch.float64)
    new = both()
    weights = upcycle(new, old.state_dict(), 1)
    assert torch.equal(weights["stack.blocks.1.ffn.part.router.weight"], old.stack.blocks["1"].ffn.part.router.weight)
    materialize(new, 0, dtype=torch.float64)
    new.load_state_dict(weights, strict=False)
    assert (new(Tokens.from_ids(IDS)) - old(Tokens.from_ids(IDS))).abs().max().item() < 1e-12


def test_what_does_not_fit_is_refused() -> None:
    old = dense().state_dict()
    with pytest.raises(ConfigError, match="cannot be made"):
        upcycle(moe(20, experts=4), old, 1)
    with pytest.raises(ConfigError, match="no such weight"):
        upcycle(moe(24, experts=4), {name: value for name, value in old.items() if "gate" not in name}, 1)
    with pytest.raises(ConfigError, match="no such weight"):
        upcycle(moe(24, experts=4), {name: value for name, value in old.items() if "embed" not in name}, 1)
    with pytest.raises(ConfigError, match="does not fit"):
        upcycle(moe(24, experts=4), old | {"embed.table.weight": torch.zeros(2, 16)}, 1)
