"""Test examples: two ranks simulated in one process, against one device; benchmark cases: one rank of four."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xscale_kernels.cases import Case, Example, Pick
from xscale_kernels.cross_entropy.cases import targets_of, terms_of
from xscale_kernels.linear_cross_entropy.op import reference_linear_cross_entropy
from xscale_kernels.vocab_cross_entropy.op import (
    IMPLEMENTATIONS,
    Statistics,
    vocab_gradients,
    vocab_loss,
    vocab_statistics,
)

Tensor = torch.Tensor


def draw(pick: Pick) -> Example:
    """The loss and all gradients, with every term, a bias or none, and chunks that do not divide the tokens."""
    N, D, V, terms = pick.integer(1, 20), pick.integer(1, 24), pick.integer(2, 60), terms_of(pick)
    split, chunk, biased = pick.integer(1, V - 1), pick.integer(1, 9), pick.choice(False, True)

    def run(
        hidden: Tensor,
        weight: Tensor,
        *bias_seed_targets: Tensor,
        implementation: str | None = None,
    ) -> tuple[Tensor, ...]:
        bias, seed, targets = (
            bias_seed_targets[0] if biased else None,
            bias_seed_targets[-2],
            bias_seed_targets[-1],
        )
        parts = [(0, weight[:split], None if bias is None else bias[:split])]
        parts += [(split, weight[split:], None if bias is None else bias[split:])]
        local = [
            vocab_statistics(
                hidden,
                w,
                targets,
                first,
                bias=b,
                terms=terms,
                chunk=chunk,
                implementation=implementation,
            )
            for first, w, b in parts
        ]
        lse = torch.stack([shard.lse for shard in local]).logsumexp(0)
        combined = Statistics(
            lse, local[0].picked + local[1].picked, local[0].total + local[1].total
        )
        gradients = [
            vocab_gradients(
                hidden,
                w,
                targets,
                first,
                lse,
                seed,
                V,
                bias=b,
                terms=terms,
                chunk=chunk,
                implementation=implementation,
            )
            for first, w, b in parts
        ]
        weight_gradient = torch.cat([shard.weight for shard in gradients])
        ends = [shard.bias for shard in gradients if shard.bias is not None]
        out = (
            vocab_loss(combined, targets, V, terms),
            gradients[0].hidden + gradients[1].hidden,
            weight_gradient,
        )
        return (*out, torch.cat(ends)) if ends else out

    def exact(hidden: Tensor, weight: Tensor, *bias_seed_targets: Tensor) -> tuple[Tensor, ...]:
        inputs = [
            tensor.detach().requires_grad_()
            for tensor in (hidden, weight, *bias_seed_targets[: int(biased)])
        ]
        with torch.enable_grad():
            loss = reference_linear_cross_entropy(
                inputs[0], inputs[1], inputs[2] if biased else None, bias_seed_targets[-1], terms
            )
            return (loss.detach(), *torch.autograd.grad(loss, inputs, bias_seed_targets[-2]))

    tensors = [
        pick.normal(N, D),
        pick.normal(V, D) * D**-0.5,
        *([pick.normal(V)] if biased else []),
        pick.normal(N),
    ]
    return Example(
        run=run,
        exact=exact,
        tensors=tuple(tensors),
        given=(targets_of(pick, N, V),),
        learns=False,
        slack=8.0,
        products=True,
    )


TESTS = ()


def cases(device: str) -> Iterator[Case]:
    """Statistics and gradients; "eager" is the definition, with all local logits."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for N, V, D in (
        ((8192, 32768, 4096),) if device == "cuda" else ((1024, 8192, 256), (1024, 32768, 128))
    ):
        hidden, weight = (torch.randn(size, D, device=device).to(dtype) for size in (N, V))
        targets, seed = torch.randint(0, 4 * V, (N,), device=device), torch.ones(N, device=device)
        weight *= D**-0.5

        def both(
            implementation: str,
            hidden: torch.Tensor = hidden,
            weight: torch.Tensor = weight,
            targets: torch.Tensor = targets,
            seed: torch.Tensor = seed,
        ) -> object:
            statistics = vocab_statistics(hidden, weight, targets, 0, implementation=implementation)
            vocabulary = 4 * weight.shape[0]
            return vocab_gradients(
                hidden,
                weight,
                targets,
                0,
                statistics.lse,
                seed,
                vocabulary,
                implementation=implementation,
            )

        names = {"eager": "reference"} | {
            entry.name: entry.name for entry in IMPLEMENTATIONS if entry.name != "reference"
        }
        ways = {way: (lambda name=name, both=both: both(name)) for way, name in names.items()}
        # The logits are computed twice: each token's normaliser is known only after the all-reduce.
        yield Case(f"N={N} V={V} D={D} {dtype}", ways, flops=8.0 * N * V * D, at={"vocabulary": V})
