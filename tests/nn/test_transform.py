"""Parts of BERT at the ends of its blocks: a norm of the embeddings, a transform and a bias before the logits."""

import torch
import torch.nn.functional as F

from xscale.nn.blocks.stack import StackConfig
from xscale.nn.materialize import materialize
from xscale.nn.model.encoder import Encoder
from xscale.nn.norm.norm import Layer
from xscale.nn.tokens import Tokens

CONFIG = Encoder.Config(
    width=32,
    stack=StackConfig(depth=1),
    embedding_norm=Layer.Config(),
    transform="gelu",
    head_bias=True,
)


def built() -> Encoder:
    with torch.device("meta"):
        model = Encoder(CONFIG, 20, 8)
    materialize(model, 0, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    return model


def test_logits_and_loss_are_the_formula() -> None:
    model, tokens = built(), Tokens.from_ids(torch.arange(8)[None])
    embedded = F.embedding(tokens.ids, model.embed.table.weight)
    norm = model.embed.norm
    assert norm is not None
    embedded = F.layer_norm(embedded, (32,), norm.weight, norm.bias, 1e-5)
    assert torch.allclose(model.embed(tokens), embedded)
    x = model.stack(embedded, tokens)
    head = model.head
    assert head.transform is not None
    assert head.bias is not None
    x = F.gelu(F.linear(x, head.transform.dense.weight, head.transform.dense.bias))
    wanted = F.linear(head.transform.norm(x), head.weight, head.bias)
    assert torch.allclose(model(tokens), wanted)
    targets = torch.tensor([[3, -100, 1, 2, -100, 4, 5, 6]])
    loss = F.cross_entropy(wanted[0], targets[0], reduction="sum")
    assert torch.allclose(model(tokens, targets), loss)
    (found,) = torch.autograd.grad(model(tokens, targets), [head.bias])
    (expected,) = torch.autograd.grad(loss, [head.bias])
    assert torch.allclose(found, expected)


def test_without_them_there_are_no_such_parameters() -> None:
    names = {
        name for name, _ in Encoder(Encoder.Config(width=32, stack=StackConfig(depth=1)), 20, 8).named_parameters()
    }
    more = {name for name, _ in built().named_parameters()}
    assert {name.rpartition(".")[0] for name in more - names} == {
        "embed.norm",
        "head",
        "head.transform.dense",
        "head.transform.norm",
    }
