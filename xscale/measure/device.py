"""The most floating-point operations a second that a device can do: what MFU is a share of."""

import time

import torch

PEAKS = {
    # Dense bfloat16 FLOP/s, from the makers' data sheets.
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "V100": 125e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of the device in `dtype`; on a CPU measured by a matrix product, None for a GPU that is not listed."""
    if device.type == "cpu":
        return _measured(dtype)
    name = torch.cuda.get_device_name(device)
    peak = next((peak for known, peak in PEAKS.items() if known in name), None)
    if peak is None or dtype == torch.bfloat16:
        return peak
    return peak / (2 if dtype == torch.float32 else 15)


def _measured(dtype: torch.dtype) -> float:
    """Best of a few products of 512 x 512 matrices, as many threads as torch has."""
    a, b = torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return float(2 * 512**3 / best)
