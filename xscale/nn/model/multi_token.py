"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2): further tokens are predicted in training.

    h'_i^k = M_k [norm(h_i^{k-1}); norm(Emb(t_{i+k}))],  h^k = TRM_k(h'^k),  P_{i+k+1}^k = OutHead(h_i^k)
    L = L_main + lambda / D sum_k L^k,  L^k = -1/T sum_i log P_{i+k+1}^k[t_{i+k+1}],  k = 1 .. D

h^0 [B, T, D] is the output of the stack, after its final norm. Emb and OutHead are the model's embedding and head, and
TRM_k is a block like the stack's last one, with a final norm if the stack has one. The causal chain is complete: at
token i module k has read t_{i+k}, and predicts the next one. The last k tokens of a sequence, and of each packed
document, have no target k + 1 tokens ahead; they pass the blocks, and routers, as the others do.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xscale.core.config import Config, PositiveFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import kinds, take
from xscale.nn.auxiliary import attach
from xscale.nn.blocks.stack import Stack, StackConfig
from xscale.nn.dims import Dims
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.module import Module
from xscale.nn.norm.norm import NORMS, Norm
from xscale.nn.residual.residual_stream import RESIDUALS
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class MtpConfig(Config):
    depth: PositiveInt = 1
    """D, the modules: module k predicts the token k + 1 ahead."""
    loss_weight: PositiveFloat = 0.3
    """Lambda, the weight of the mean of the modules' losses (DeepSeek-V3: 0.3, and 0.1 late in the run)."""


class MtpModule(Module):
    """One module: the states of the module before and the embeddings of tokens ahead -> its states."""

    seams = {
        "hidden_norm": Role.BETWEEN_REGIONS,
        "embedding_norm": Role.BETWEEN_REGIONS,
        "project": Role.BETWEEN_REGIONS,
    }

    def __init__(self, stack: StackConfig, dims: Dims) -> None:
        """`stack` is that of the model."""
        super().__init__()
        block = stack.block_config(stack.depth - 1)
        self.hidden_norm: Norm = NORMS.build(block.norm, dims.width)
        self.embedding_norm: Norm = NORMS.build(block.norm, dims.width)
        self.project = Linear(2 * dims.width, dims.width, ("width", "width"), dims.init)
        self.stack = Stack(StackConfig(depth=1, block=block), dims)

    def forward(self, x: Tensor, embeddings: Tensor, tokens: Tokens) -> Tensor:
        """x and embeddings [B, T, D] -> [B, T, D]."""
        both = torch.cat(
            (self.hidden_norm(x, tokens), self.embedding_norm(embeddings, tokens)), -1
        )  # [B, T, 2 D]
        out: Tensor = self.stack(self.project(both), tokens)
        return out


class MultiToken(Module):
    """The modules, whose losses are attached to the output of the model's stack in training."""

    beside_stages = True
    seams = {"ahead": Role.TOKENS_AHEAD, "embed_ahead": Role.EMBEDDING_OF_IDS}

    def __init__(self, config: MtpConfig, stack: StackConfig, dims: Dims) -> None:
        """`stack` is that of the model."""
        super().__init__()
        self.weight = config.loss_weight / config.depth
        self.at = nn.ModuleDict(
            {str(ahead): MtpModule(stack, dims) for ahead in range(1, config.depth + 1)}
        )
        """The modules, by the tokens that they look ahead."""

    @staticmethod
    def check(config: MtpConfig | None, stack: StackConfig, path: str) -> list[Problem]:
        """List why a model with this stack has no such modules."""
        if config is None:
            return []
        stack_path = f"{path.removesuffix('.mtp')}.stack"
        block = stack.block_config(stack.depth - 1)
        stream = RESIDUALS.of(block.residual)
        refused = {
            ("block.residual", stream.part.instead(block.residual)): (
                not stream.traits.hidden_states,
                f"{stream.part.form}, and a module reads the stack's output",
            ),
            ("block.gates", None): (
                block.gates is not None,
                "the budget of the gates is that of the stack's blocks",
            ),
            ("block.residual", "post"): (
                stream.part.set_by_data,
                f"residual '{stream.name}' initialises the stack's blocks alone",
            ),
            ("halting", None): (
                stack.halting is not None,
                "a module has one block, and halting repeats blocks",
            ),
            ("step_signal", False): (
                stack.step_signal,
                "the signal of a step numbers the stack's blocks",
            ),
            ("linear_maps", "real"): (
                stack.linear_maps != "real",
                "the projection of two vectors is no quaternion map",
            ),
            ("exits", None): (
                stack.exits is not None,
                "exits weigh the losses of the stack's own depths",
            ),
        }
        problems = [
            Problem(path, what, choices=take(None) + take(value, key=f"{stack_path}.{key}"))
            for (key, value), (holds, what) in refused.items()
            if holds
        ]
        if any(MIXERS.of(mixer).part.score_heads(mixer) is not None for mixer in block.mixers()):
            what = "the block of a module follows a projection, which hands on no attention scores"
            problems.append(
                Problem(
                    path,
                    what,
                    choices=take(None) + kinds(["softmax"], f"{stack_path}.block.mixer.core"),
                )
            )
        if NORMS.of(block.norm).traits.batch_statistics:
            what = f"norm '{block.norm.kind}' would count tokens without a target ahead"
            norms = kinds(NORMS.able(batch_statistics=False), f"{stack_path}.block.norm")
            problems.append(Problem(path, what, choices=take(None) + norms))
        return problems

    def attach_loss(
        self, x: Tensor, tokens: Tokens, targets: Tensor | None, table: nn.Module, head: nn.Module
    ) -> Tensor:
        """Return the output x [B, T, D] of the stack with the losses attached; in evaluation x.

        `targets` [B, T] are the next tokens; `table` is the embedding, ids [B, T] -> [B, T, D].
        """
        if targets is None or tokens.forward.target_weight is None:
            return x
        weight = self.weight * tokens.forward.target_weight * tokens.further_loss_weight()
        # A teacher has no states and logits of these modules.
        states, tokens = x, tokens.with_forward(states=None)
        for name, part in self.at.items():
            ids, learned = self.ahead(tokens, targets, int(name))
            states = part(states, self.embed_ahead(table, ids), tokens)
            loss = head(states, learned, tokens)
            self._record(part, loss, tokens)
            x = attach(x, loss, weight)
        return x

    def ahead(self, tokens: Tokens, targets: Tensor, places: int) -> tuple[Tensor, Tensor]:
        """Return the ids [B, T] that stand `places` after each token, and the targets [B, T] of these. A seam: another
        rank may have them."""
        return shift_left(tokens.ids, places, 0), targets_ahead(tokens, targets, places)

    def embed_ahead(self, table: nn.Module, ids: Tensor) -> Tensor:
        """ids [B, T] -> embeddings [B, T, D]. A seam: sequence parallelism shards them along the sequence."""
        embeddings: Tensor = table(ids)
        return embeddings

    def _record(self, part: Any, loss: Tensor, tokens: Tokens) -> None:
        """Record the mean loss of a module over the targets of the step, as a mean over its micro-batches."""
        forward = tokens.forward
        if (
            forward.stats is None
            or forward.aux_loss_weight is None
            or forward.target_weight is None
        ):
            return
        # The mean over shards of a sequence too, each of which has a part of the sum.
        weight = forward.target_weight / forward.aux_loss_weight / tokens.fraction()
        forward.stats.add(f"{part.path}/loss", loss.detach() * weight)


def shift_left(x: Tensor, places: int, fill: int) -> Tensor:
    """Return x [B, T] with what stands `places` later in the place of each element, and `fill` at the end."""
    return F.pad(x[:, places:], (0, min(places, x.shape[1])), value=fill)


def targets_ahead(tokens: Tokens, targets: Tensor, ahead: int) -> Tensor:
    """Return the targets [B, T] of the token `ahead` + 1 after each token; none where a document ends before it."""
    shifted = shift_left(targets, ahead, IGNORE_INDEX)
    if tokens.documents is None:
        return shifted
    is_same = shift_left(tokens.documents, ahead, -1) == tokens.documents
    return shifted.masked_fill(~is_same, IGNORE_INDEX)
