"""Longformer (Beltagy et al. 2020): RoBERTa's model with sliding-window attention; windows in tokens.

The library stores projections of global tokens in every model, and its caller says which tokens are global. A model
whose global projections are copies of the others, as they are before any token was global, becomes the mixer
`attention`; another becomes the mixer `longformer`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from xscale.convert.hf.architecture import Data, ModelSizes, Requirements
from xscale.convert.hf.types.bert import LM_HEAD, ROBERTA, TYPES, tensors
from xscale.convert.mapping import DUPLICATED, WeightMapping
from xscale.nn.attention.softmax import Softmax
from xscale.nn.mixer.attention import Attention

LOCAL = {".self.query.": ".part.q.", ".self.key.": ".part.k.", ".self.value.": ".part.v."}
"""Projections that the library stores twice, the second ones for global tokens -> their names in xscale."""
GLOBAL_TOKENS = "global_token_indices"
"""Key that an export adds to config.json, which the library ignores: global tokens are an input of its model."""

MIN_SIDE = 2
"""Minimum tokens on each side of the query in the library's operators."""


def to_hf(config: Any, sizes: ModelSizes, require: Requirements) -> Data:
    """Convert a model's config to config.json; what does not map becomes a problem."""
    indices = _global_tokens(config, require)
    data = DENSE.to_hf(_dense(config), sizes, require)
    if not data:
        return {}
    windows = _windows(config, require)
    if not require.problems:
        _check_divide(windows, require, "model.stack.rules")
    return (
        data
        | {"attention_window": windows}
        | ({} if indices is None else {GLOBAL_TOKENS: list(indices)})
    )


def from_hf(data: Data, require: Requirements) -> Data:
    """Convert config.json to the `model` section; what does not map becomes a problem."""
    depth, windows = data["num_hidden_layers"], data["attention_window"]
    windows = [windows] * depth if isinstance(windows, int) else windows
    if len(windows) != depth or any(window < 2 * MIN_SIDE or window % 2 for window in windows):
        what = f"{windows} is not an even number of at least {2 * MIN_SIDE} tokens for each of {depth} layers"
        fix = "One such number, or a list with one per layer, would map."
        require.reject("attention_window", what, fix)
        return {}
    _check_divide(windows, require, "attention_window")
    section = DENSE.from_hf(data, require)
    if not section:
        return {}
    stack = section["stack"]
    mixer = stack["block"]["mixer"]
    stack["block"]["mixer"] = mixer | {"core": _core(windows[0])}
    stack["rules"] = _rules(windows, mixer)
    indices = data.get(GLOBAL_TOKENS)
    return section if indices is None else _with_global_tokens(section, indices)


def weights(config: Any, sizes: ModelSizes) -> list[WeightMapping]:
    """Map every tensor of a model's config."""
    copied = config.stack.block_config(0).mixer.kind == "attention"
    return [
        weight
        for mapping in DENSE.weights(_dense(config), sizes)
        for weight in _with_global_weights(mapping, copied)
    ]


def _global_tokens(config: Any, require: Requirements) -> tuple[int, ...] | None:
    """Return the indices of the global tokens; None: the mixers have none. Record a problem if they differ."""
    mixers = [config.stack.block_config(layer).mixer for layer in range(config.stack.depth)]
    indices = {getattr(mixer, GLOBAL_TOKENS, None) for mixer in mixers}
    if len(indices) > 1:
        what = f"{require.architecture} has the same global tokens in all layers"
        require.reject(
            "model.stack.rules", what, f"Mixers with the same {GLOBAL_TOKENS} would map."
        )
    return next(iter(indices))


def _with_global_tokens(section: Data, indices: Sequence[int]) -> Data:
    """Return the section with the mixer `longformer` in all layers."""
    stack, more = section["stack"], {"kind": "longformer", GLOBAL_TOKENS: list(indices)}
    block = stack["block"] | {"mixer": stack["block"]["mixer"] | more}
    rules = [rule | {"mixer": rule["mixer"] | more} for rule in stack["rules"]]
    return section | {"stack": stack | {"block": block, "rules": rules}}


def _global_by_value(section: Data, tensor: Callable[[str], Tensor | None]) -> Data:
    """Make the first token global if the file has projections of global tokens that are no copies of the others."""
    if section["stack"]["block"]["mixer"]["kind"] != "attention":
        return section
    for layer in range(section["stack"]["depth"]):
        for local in LOCAL:
            for prefix in ("longformer.", ""):
                name = f"{prefix}encoder.layer.{layer}.attention{local}weight"
                first, second = tensor(name), tensor(name.replace(local, f"{local[:-1]}_global."))
                if first is not None and second is not None and not torch.equal(first, second):
                    return _with_global_tokens(section, (0,))
    return section


def _global_mask(config: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return the library's input that makes the model's global tokens global, for ids [B, T]."""
    indices = getattr(config.stack.block_config(0).mixer, GLOBAL_TOKENS, None)
    if indices is None:
        return {}
    places = torch.arange(ids.shape[1])
    mask = torch.isin(places, torch.tensor(indices)).to(ids.dtype)
    return {"global_attention_mask": mask.expand_as(ids)}


def _dense(config: Any) -> Any:
    """Return the config with every core replaced by softmax."""

    def dense(part: Any) -> Any:
        mixer = part.mixer
        if getattr(mixer, "core", None) is None:
            return part
        if mixer.kind == "longformer":
            mixer = Attention.Config(
                **{name: getattr(mixer, name) for name in Attention.Config.model_fields}
            )
        return _with(part, mixer=_with(mixer, core=Softmax.Config()))

    stack = config.stack
    return _with(
        config, stack=_with(stack, block=dense(stack.block), rules=tuple(map(dense, stack.rules)))
    )


def _with(config: Any, **changes: Any) -> Any:
    return config.model_copy(update=changes)


def _windows(config: Any, require: Requirements) -> list[int]:
    """Return the window of each block: tokens on both sides of the query, which is not counted."""
    windows = []
    for layer in range(config.stack.depth):
        core, at = config.stack.block_config(layer).mixer.core, "model.stack.block.mixer.core"
        if not require.one_of(at, core.kind, "block_sparse"):
            continue
        require.one_of(f"{at}.soft_cap", core.soft_cap, None)
        if require.one_of(f"{at}.pattern", core.pattern.kind, "band"):
            if core.pattern.left < MIN_SIDE:
                what = f"transformers' {require.architecture} cannot run with {core.pattern.left} on each side"
                require.reject(f"{at}.pattern.left", what, f"{MIN_SIDE} or more would map.")
            require.one_of(f"{at}.pattern.right", core.pattern.right, core.pattern.left)
            windows.append(2 * core.pattern.left)
    return windows


def _check_divide(windows: Sequence[int], require: Requirements, path: str) -> None:
    """Check that the windows divide the largest: the library pads to its multiple, and needs a multiple of each."""
    largest = max(windows)
    if wrong := sorted({window for window in windows if largest % window}):
        what = f"windows of {', '.join(map(str, wrong))} tokens do not divide the largest, of {largest}"
        require.reject(path, what, "Divisors of the largest would map.")


def _core(window: int) -> Data:
    side = window // 2
    return {"kind": "block_sparse", "pattern": {"kind": "band", "left": side, "right": side}}


def _rules(windows: Sequence[int], mixer: Data) -> list[Data]:
    """Return rules for the layers whose window differs from the first layer's, one per group of consecutive layers."""
    rules: list[Data] = []
    at = 0
    for window, run in groupby(windows):
        first, at = at, at + len(list(run))
        if window != windows[0]:
            rules.append({"first": first, "last": at, "mixer": mixer | {"core": _core(window)}})
    return rules


def _with_global_weights(mapping: WeightMapping, copied: bool) -> list[WeightMapping]:
    """Map the projections of global tokens too: as copies of the local ones, or those of the mixer `longformer`."""
    name = mapping.external_names[0]
    for local, part in LOCAL.items():
        if local not in name:
            continue
        global_name = name.replace(local, f"{local[:-1]}_global.")
        if copied:
            return [replace(mapping, external_names=(name, global_name), transform=DUPLICATED)]
        xscale_global_name = mapping.xscale_names[0].replace(part, f".part.global_{part[-2]}.")
        return [
            mapping,
            replace(mapping, xscale_names=(xscale_global_name,), external_names=(global_name,)),
        ]
    return [mapping]


DENSE = ROBERTA.variant(
    "longformer",
    "LongformerForMaskedLM",
    tensors=tensors("longformer", *LM_HEAD, types=1, offset=True),
    fixed={"is_decoder": None, "add_cross_attention": None},
    ignored_keys=frozenset({"attention_window", "onnx_export", "sep_token_id"}),
    notes=(
        TYPES,
        "global attention: transformers takes the global tokens as an input, global_attention_mask. A model whose "
        "projections of global tokens are no copies of the others is imported as the mixer longformer with the first "
        "token global; with the mixer attention no token is, and an export writes copies",
    ),
)
"""The model with softmax attention."""
LONGFORMER = replace(
    DENSE.architecture(),
    to_hf=to_hf,
    from_hf=from_hf,
    weights=weights,
    attention_span=lambda config: max(_windows(config, Requirements("longformer"))),
    with_tensors=_global_by_value,
    inputs=_global_mask,
)
