"""linear_attention's Triton kernels over segments of a sequence, and at offsets that need 64 bits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xscale_kernels.linear_attention import chunked, triton


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("options", [(), ("gates",), ("documents",), ("gates", "documents", "state")], ids=str)
@pytest.mark.parametrize("segments", [1, 3])
def test_segments_are_the_whole(device: str, reverse: bool, options: tuple[str, ...], segments: int) -> None:
    B, H, T, K, M = 2, 2, 90, 20, 9
    q, k, v = (torch.randn(B, H, T, width, device=device) for width in (K, K, M))
    gates = -torch.rand(B, H, T, device=device) if "gates" in options else None
    documents = torch.arange(T, device=device).div(37).long().repeat(B, 1) if "documents" in options else None
    state = torch.randn(B, H, K, M, device=device) if "state" in options else None
    ours = triton.scan(q, k, v, gates, documents, state, reverse, 16, segments)
    theirs = chunked.scan(q, k, v, gates, documents, state, reverse, 16)
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-4)


def test_offsets_past_two_to_the_31(device: str) -> None:
    """Tokens so far apart in memory that a token's offset needs 64 bits; most of the memory is never touched."""
    stride = 2**27 + 64
    torch.use_deterministic_algorithms(False)
    room = torch.empty(20 * stride, dtype=torch.float16, device=device)
    x = room.as_strided((1, 1, 20, 16), (0, 0, stride, 1)).copy_(torch.randn(1, 1, 20, 16))
    near = x.contiguous()
    for reverse in (False, True):
        ours = triton.scan(x, x, x, None, None, None, reverse, 16)
        theirs = triton.scan(near, near, near, None, None, None, reverse, 16)
        assert all(map(torch.equal, ours, theirs))


SEGMENTS = {
    # Tokens, programs of a segment, programs at once -> segments of at least 8 chunks of 64 tokens.
    "one program an SM": (65536, 4, 132, 33),
    "four programs an SM": (65536, 4, 528, 128),
    "a launch that fills the GPU": (65536, 200, 132, 1),
    "a short sequence": (1024, 4, 528, 2),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_as_many_segments_as_are_resident(name: str) -> None:
    T, programs, resident, expected = SEGMENTS[name]
    assert triton._segments(T, 64, programs, resident) == expected


@pytest.mark.parametrize(("registers", "resident"), [(255, 132), (128, 264), (64, 528)])
def test_the_compiled_kernel_says_what_is_resident(
    registers: int, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments are those of a launch: pointers, strides, sizes, and the settings by name."""
    names, calls, settings = triton._chunk_kernel.arg_names, [], {"BL": 64, "num_warps": 8}

    def warmup(*arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        calls.append(dict(zip(names, arguments, strict=False)) | options)
        return SimpleNamespace(run=print, n_regs=registers, metadata=SimpleNamespace(shared=0))

    gpu = SimpleNamespace(
        multi_processor_count=132, max_threads_per_multi_processor=2048, shared_memory_per_multiprocessor=233_472
    )
    monkeypatch.setattr(triton, "_chunk_kernel", SimpleNamespace(warmup=warmup))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device, dtype: empty(*shape, dtype=dtype))
    dtypes = (torch.bfloat16, torch.float32, torch.int32)
    triton._resident.cache_clear()
    found = triton._resident(torch.device("cuda"), dtypes, 64, 32, tuple(settings.items()))
    triton._resident.cache_clear()
    assert found == resident
    (call,) = calls
    assert [call[name].dtype for name in ("q", "out", "gates", "documents", "states")] == [
        *[torch.bfloat16] * 2, torch.float32, torch.int32, torch.float32,
    ]  # fmt: skip
    assert {name: call[name] for name in ("sqt", "svt", "H", "K", "M", "T", "length", "STATE", "OUTPUTS", "LAST")} == {
        "sqt": 64, "svt": 32, "H": 16, "K": 64, "M": 32, "T": 512, "length": 512, "STATE": True, "OUTPUTS": True,
        "LAST": False,
    }  # fmt: skip
