"""Llama and Mixtral as a user of plain PyTorch writes them, and those of transformers: baselines of a training step.

torch's RMSNorm, rotary positions, SDPA, SwiGLU, and experts by torch's grouped matmul, or in a loop on a CPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xscale.core.config import encode
from xscale.core.errors import ConfigError
from xscale.settings.settings import Settings


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of the baseline."""

    width: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    length: int
    tied: bool
    experts: int = 0
    """0: a dense model."""
    top_k: int = 0


def llama_sizes(settings: Settings, vocabulary: int) -> LlamaSizes:
    """Return the sizes of a model that is a Llama or a Mixtral; ConfigError with what it has otherwise."""
    model: dict[str, Any] = encode(settings)["model"]
    stack = model.get("stack") or {}
    block = stack.get("block") or {}
    mixer, ffn = block.get("mixer") or {}, block.get("ffn") or {}
    expert = ffn.get("expert") if ffn.get("kind") == "moe" else ffn
    differences = [
        text
        for text, differs in (
            ("its model is no decoder", model.get("kind") != "decoder"),
            ("its layers differ", bool(stack.get("rules"))),
            ("its positions are not rope", (model.get("position") or {}).get("kind") != "rope"),
            ("its norm is not rms", (block.get("norm") or {}).get("kind") != "rms"),
            ("its core is not softmax", (mixer.get("core") or {}).get("kind") != "softmax"),
            ("its ffn is not gated", (expert or {}).get("kind") != "gated"),
            ("it drops tokens", ffn.get("capacity_factor") is not None),
        )
        if differs
    ]
    if differences:
        raise ConfigError(
            "model",
            f"no baseline for a model that is no Llama and no Mixtral: {', '.join(differences)}",
        )
    assert expert is not None
    return LlamaSizes(
        width=model["width"],
        depth=stack["depth"],
        heads=mixer["heads"],
        kv_heads=mixer["kv_heads"] or mixer["heads"],
        hidden=expert["hidden"] or 8 * model["width"] // 3,
        vocabulary=vocabulary,
        length=settings.data.sequence_length,
        tied=model["tied"],
        experts=ffn.get("experts", 0) if ffn.get("kind") == "moe" else 0,
        top_k=ffn["router"].get("top_k", 1) if ffn.get("kind") == "moe" else 0,
    )


class LlamaAttention(nn.Module):
    """Causal attention with grouped heads and rotary positions, by SDPA."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.head_width = sizes.width // sizes.heads
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k, self.v = (
            nn.Linear(sizes.width, sizes.kv_heads * self.head_width, bias=False) for _ in range(2)
        )
        self.o = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        q, k = (rotate(heads, cos, sin) for heads in (q, k))
        grouped = q.shape[1] != k.shape[1]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.o(attended.transpose(1, 2).flatten(2))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head, in float32: x [B, H, T, K], cos and sin [T, K / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class LlamaMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class MixtralExperts(nn.Module):
    """Router and experts of Mixtral, dropless."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        E = sizes.experts
        F_ = sizes.hidden
        D = sizes.width
        self.top_k = sizes.top_k
        self.router = nn.Linear(D, E, bias=False)
        self.gate, self.up = (
            nn.Parameter(torch.empty(E, F_, D).normal_(std=D**-0.5)) for _ in range(2)
        )
        self.down = nn.Parameter(torch.empty(E, D, F_).normal_(std=F_**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        flat = x.flatten(0, 1)
        weights, experts = self.router(flat).float().softmax(-1).topk(self.top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = experts.flatten().argsort(stable=True)
        counts = torch.zeros(self.router.out_features, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, experts.flatten(), torch.ones_like(experts.flatten()))
        token = order // self.top_k
        rows = flat[token]
        hidden = F.silu(grouped_linear(rows, self.gate, counts)) * grouped_linear(
            rows, self.up, counts
        )
        outputs = grouped_linear(hidden, self.down, counts) * weights.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, token, outputs).view_as(x)


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows [M, D], sorted by expert, by each expert's weight [E, F, D] -> [M, F]."""
    if rows.is_cuda:
        offsets = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows.to(torch.bfloat16), weight.to(torch.bfloat16).mT, offs=offsets)
    parts = torch.split(rows, counts.tolist())
    return torch.cat(
        [F.linear(part, matrix) for part, matrix in zip(parts, weight.to(rows.dtype), strict=True)]
    )


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and a residual connection."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(sizes.width, eps=1e-6) for _ in range(2))
        self.attention = LlamaAttention(sizes)
        self.mlp: nn.Module = MixtralExperts(sizes) if sizes.experts else LlamaMlp(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class PlainLlama(nn.Module):
    """A decoder that returns the sum of the losses of its targets."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.table = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList([LlamaBlock(sizes) for _ in range(sizes.depth)])
        self.norm = nn.RMSNorm(sizes.width, eps=1e-6)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        nn.init.normal_(self.table.weight, std=0.02)
        if sizes.tied:
            self.head.weight = self.table.weight
        half = sizes.width // sizes.heads // 2
        frequencies = 10000.0 ** -(torch.arange(half, device="cpu") / half)
        angles = torch.arange(sizes.length, device="cpu")[:, None] * frequencies  # [T, K / 2]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Ids and targets [B, T]; targets of -100 are ignored."""
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )


class TransformersLlama(nn.Module):
    """The model of transformers, with SDPA and the same loss."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        import transformers

        options: dict[str, Any] = {
            "hidden_size": sizes.width,
            "intermediate_size": sizes.hidden,
            "num_hidden_layers": sizes.depth,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "vocab_size": sizes.vocabulary,
            "max_position_embeddings": sizes.length,
            "tie_word_embeddings": sizes.tied,
            "use_cache": False,
            "attn_implementation": "sdpa",
        }
        kind: Any = transformers.LlamaForCausalLM
        if sizes.experts:
            kind = transformers.MixtralForCausalLM
            options |= {
                "num_local_experts": sizes.experts,
                "num_experts_per_tok": sizes.top_k,
                "sliding_window": None,
            }
        config = kind.config_class(**options)
        if sizes.experts:
            config._experts_implementation = "grouped_mm"
        self.model = kind(config)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Ids and targets [B, T]; targets of -100 are ignored."""
        logits = self.model(input_ids=ids).logits.float()
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
