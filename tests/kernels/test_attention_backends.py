"""The order of attention's backends on a GPU: the fastest that was measured, for the time of a run."""

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend

from xscale_kernels.attention_backends import FLASH, MEASURED, attention_backends, sentences

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CUDNN_FIRST = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]


def order() -> list[SDPBackend]:
    found: list[SDPBackend] = attention._cur_sdpa_kernel_backends(with_priority=True)
    return found


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [(GPU, (9, 0), CUDNN_FIRST), (GPU, (8, 0), None), (GPU, (12, 0), None), (CPU, (9, 0), None)],
    ids=["Hopper", "Ampere", "not measured", "CPU"],
)
def test_the_order(
    device: torch.device,
    capability: tuple[int, int],
    expected: list[SDPBackend] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    before = order()
    with attention_backends(device):
        assert order() == (expected or before)
    assert order() == before
    line = "Attention without packed documents: cudnn first, then flash, efficient, math"
    assert sentences(device)[:1] == ([line] if expected else [])


def test_no_backend_is_lost() -> None:
    """A call that the first refuses, such as one in float32, finds another."""
    assert all(set(names) == {"cudnn", "flash", "efficient", "math"} for names in MEASURED.values())


class Registry:
    """Stands for torch's registry of FlashAttention, and for the packages with the kernels."""

    def __init__(self, patch: pytest.MonkeyPatch, installed: set[str], broken: bool = False) -> None:
        self.active: str | None = None
        self.broken = broken
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(attention, "activate_flash_attention_impl", self.activate)
        patch.setattr(attention, "restore_flash_attention_impl", self.restore)

        def load(module: str) -> None:
            if module not in installed:
                raise ModuleNotFoundError(f"No module named '{module}'")

        patch.setattr("xscale_kernels.attention_backends.importlib.import_module", load)

    def activate(self, name: str) -> None:
        if self.broken:
            raise RuntimeError("Module does not expose FA3 backward kernels")
        self.active = name

    def restore(self) -> None:
        self.active = None


FA3, FA4 = "flash_attn_interface", "flash_attn.cute.interface"
NOT_FA3 = f"not FA3: {FA3} cannot be imported: No module named '{FA3}'"
FLASH_CASES: dict[str, tuple[set[str], bool, str | None, str]] = {
    "both": ({FA3, FA4}, False, "FA3", "FlashAttention: FA3"),
    "the newest alone": ({FA4}, False, "FA4", f"FlashAttention: FA4; {NOT_FA3}"),
    "none": (set(), False, None, f"FlashAttention: FA2; {NOT_FA3}; not FA4: {FA4} cannot be imported: "),
    "dropout": ({FA3, FA4}, True, None, "FlashAttention: FA2; not FA3: it drops no attention weights; not FA4: "),
}


@pytest.mark.parametrize("name", FLASH_CASES)
def test_the_flash_attention_that_is_installed_is_active_in_a_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, dropout, active, line = FLASH_CASES[name]
    registry = Registry(monkeypatch, installed)
    with attention_backends(GPU, dropout=dropout):
        assert registry.active == active
    assert registry.active is None
    (said,) = sentences(GPU, dropout=dropout)[1:]
    assert said.startswith(line)


def test_one_that_torch_cannot_activate_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Registry(monkeypatch, {FA3}, broken=True)
    caplog.set_level("INFO", logger="xscale_kernels")
    with attention_backends(GPU):
        pass
    assert "FA3 refused: Module does not expose FA3 backward kernels" in caplog.text


def test_torch_names_the_versions_so() -> None:
    """A new version of torch may rename them."""
    known = attention.list_flash_attention_impls()
    assert {name for versions in FLASH.values() for name, _ in versions} <= set(known)
