"""What cross_entropy is timed on."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xscale_kernels.bench.case import BothWays, Case, both_ways
from xscale_kernels.cross_entropy import reference
from xscale_kernels.cross_entropy.op import IMPLEMENTATIONS, cross_entropy
from xscale_kernels.cross_entropy.terms import Terms

TESTS = ("test_cross_entropy",)


def cases(device: str) -> list[Case]:
    """Logits of usual vocabularies."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    found = []
    for N, V in ((8192, 32768), (8192, 131072)) if device == "cuda" else ((2048, 8192), (512, 32768)):
        logits = torch.randn(N, V, device=device, dtype=dtype, requires_grad=True)
        targets = torch.randint(0, V, (N,), device=device)
        ways = both_ways(
            lambda x, t, implementation: cross_entropy(x, t, implementation=implementation),
            lambda x, t: reference.cross_entropy(x, t, Terms()),
            IMPLEMENTATIONS,
            (logits, targets),
        )
        ways["F"] = BothWays(lambda x, t: F.cross_entropy(x.float(), t, reduction="none"), (logits, targets))
        found.append(
            Case(f"N={N} V={V} {dtype}", ways, bytes=3.0 * logits.numel() * logits.element_size(), at={"vocabulary": V})
        )
    return found
