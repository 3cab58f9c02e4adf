"""The decoder in plain torch modules, with the parameter names of xscale's decoder."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xscale.bench.parallel.sizes import SEED, ParallelSizes
from xscale.nn.materialize import materialize
from xscale.nn.model.model import MODELS

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v [B, H, T, K] -> [B, H, T, K]."""


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by torch's SDPA."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.attend: AttentionFunction = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        out: Tensor = self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out


class SwiGlu(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class TorchExperts(nn.Module):
    """Stacked weights of experts; rows are sorted by expert."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.empty(experts, hidden, width)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        parts = zip(
            torch.split(rows, counts),
            self.gate.unbind(),
            self.up.unbind(),
            self.down.unbind(),
            strict=True,
        )
        return torch.cat(
            [
                F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
                for x, gate, up, down in parts
            ]
        )


class TorchMoe(nn.Module):
    def __init__(self, sizes: ParallelSizes) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.experts = TorchExperts(sizes.experts, sizes.width, sizes.hidden // sizes.top_k)
        self.run: Callable[[Tensor, Tensor], Tensor] = lambda rows, counts: self.experts(
            rows, counts.tolist()
        )
        """Rows [M, D] sorted by expert, rows per expert -> outputs [M, D]."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, experts = self.router(flat).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self.router.out_features)
        token = order // self.top_k
        outputs = self.run(flat[token], counts)
        out = torch.zeros_like(flat).index_add(0, token, outputs * weights.flatten()[order, None])
        return out.view_as(x)


class TorchSublayer(nn.Module):
    def __init__(self, width: int, part: nn.Module) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.part(self.norm(x))
        return out


class TorchBlock(nn.Module):
    def __init__(self, sizes: ParallelSizes, *, experts: bool) -> None:
        super().__init__()
        self.mixer = TorchSublayer(sizes.width, SelfAttention(sizes.width, sizes.heads))
        self.ffn = TorchSublayer(
            sizes.width, TorchMoe(sizes) if experts else SwiGlu(sizes.width, sizes.hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ffn(self.mixer(x))
        return out


class TorchEmbed(nn.Module):
    def __init__(self, sizes: ParallelSizes) -> None:
        super().__init__()
        self.table = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.length, sizes.width)

    def forward(self, ids: Tensor, first: int = 0) -> Tensor:
        """`first` is the position of the first token."""
        positions = torch.arange(first, first + ids.shape[1], device=ids.device)
        out: Tensor = self.table(ids) + self.position(positions)
        return out


class TorchStack(nn.Module):
    def __init__(self, sizes: ParallelSizes, *, experts: bool) -> None:
        super().__init__()
        blocks = {str(layer): TorchBlock(sizes, experts=experts) for layer in range(sizes.depth)}
        self.blocks: nn.ModuleDict | dict[str, nn.Module] = nn.ModuleDict(blocks)
        self.norm: nn.Module = nn.RMSNorm(sizes.width, eps=1e-6)


class TorchModel(nn.Module):
    """The decoder, or a pipeline stage of it: absent modules are skipped."""

    def __init__(self, sizes: ParallelSizes, *, experts: bool) -> None:
        super().__init__()
        self.embed: nn.Module | None = TorchEmbed(sizes)
        self.stack = TorchStack(sizes, experts=experts)
        self.head: nn.Module | None = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """Token ids or the previous stage's output -> logits or the next stage's input."""
        if self.embed is not None:
            x = self.embed(x, first)
        for block in self.stack.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.stack.norm(x))


def build_torch_model(sizes: ParallelSizes, *, experts: bool) -> TorchModel:
    """Build the model with xscale's initial weights."""
    with torch.device("meta"):
        decoder = MODELS.build(sizes.model(experts=experts), sizes.vocabulary, sizes.length)
    materialize(decoder, SEED)
    model = TorchModel(sizes, experts=experts)
    model.load_state_dict({_renamed(name): value for name, value in decoder.state_dict().items()})
    return model


def _renamed(name: str) -> str:
    return f"{name}.weight" if name.endswith("position") else name
