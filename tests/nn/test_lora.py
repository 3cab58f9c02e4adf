"""LoRA: the paper's sum, a start that changes nothing, frozen weights, and merged ones that compute the same."""

from typing import Any

import torch

from tests.nn.test_class_head import INPUT, settings
from xscale.nn.adapt.lora import MARK, merge_lora
from xscale.nn.linear import Linear
from xscale.nn.materialize import materialize
from xscale.nn.tokens import Tokens
from xscale.run.init_run import model_from_weights
from xscale.settings.settings import build_on_meta

LORA: dict[str, Any] = {"rank": 3, "alpha": 12.0, "match": ["*.q", "*.down"]}


def drawn(**sections: Any) -> Any:
    model = build_on_meta(settings(**sections), 40)
    materialize(model, 3, dtype=torch.float64)
    return model


def test_a_model_starts_as_it_is_without() -> None:
    plain, adapted = drawn(), drawn(lora=LORA)
    for name, value in plain.named_parameters():
        assert torch.equal(value, adapted.get_parameter(name))
    assert torch.equal(plain(Tokens.from_ids(INPUT)), adapted(Tokens.from_ids(INPUT)))
    trained = {name for name, value in adapted.named_parameters() if value.requires_grad}
    assert {name for name in trained if MARK in name} == {
        f"stack.blocks.{layer}.{path}.lora.{matrix}"
        for layer in (0, 1)
        for path in ("mixer.part.q", "ffn.part.down")
        for matrix in "ab"
    }
    assert all(MARK in name or name.startswith("head.") for name in trained)


def test_it_adds_the_product_of_two_matrices() -> None:
    adapted = drawn(lora=LORA)
    linear = adapted.get_submodule("stack.blocks.0.mixer.part.q")
    assert isinstance(linear, Linear)
    assert linear.lora is not None
    torch.nn.init.normal_(linear.lora.b)
    x = torch.randn(5, 16, dtype=torch.float64)
    w, a, b = (value.tolist() for value in (linear.weight, linear.lora.a, linear.lora.b))
    for row, got in zip(x.tolist(), linear(x).tolist(), strict=True):
        low = [sum(a[r][i] * row[i] for i in range(16)) for r in range(3)]
        for o, value in enumerate(got):
            wanted = sum(w[o][i] * row[i] for i in range(16)) + 12 / 3 * sum(b[o][r] * low[r] for r in range(3))
            assert abs(value - wanted) < 1e-12


def test_dropout_is_of_the_input_and_in_training_alone() -> None:
    adapted = drawn(lora={**LORA, "dropout": 0.5})
    linear = adapted.get_submodule("stack.blocks.0.mixer.part.q")
    assert isinstance(linear, Linear)
    lora = linear.lora
    assert lora is not None
    torch.nn.init.normal_(lora.b)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.manual_seed(1)
    got = linear.train()(x) - x @ linear.weight.T
    torch.manual_seed(1)
    kept = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
    assert 0 < kept.count_nonzero() < kept.numel()
    torch.testing.assert_close(got, 12 / 3 * (x * kept) @ lora.a.T @ lora.b.T)
    torch.testing.assert_close(linear.eval()(x), x @ (linear.weight + lora.product()).T)


def test_merged_weights_compute_the_same() -> None:
    adapted = drawn(lora=LORA)
    for name, value in adapted.named_parameters():
        if name.endswith(".lora.b"):
            torch.nn.init.normal_(value)
    precise = settings(precision={"compute": "float64", "master": "float64"})
    merged = model_from_weights(precise, 40, merge_lora(adapted))
    wanted = adapted(Tokens.from_ids(INPUT))
    assert torch.allclose(merged(Tokens.from_ids(INPUT)), wanted, rtol=1e-12)
    assert not torch.allclose(drawn()(Tokens.from_ids(INPUT)), wanted, rtol=1e-3)
