"""The architectures of transformers that can be converted, and the choice among them."""

from dataclasses import replace
from typing import Any

from xscale.convert.hf.architecture import (
    Architecture,
    Data,
    ModelSizes,
    Requirements,
    Section,
    require_features,
)
from xscale.convert.hf.bart import BART
from xscale.convert.hf.deberta import DEBERTA_V2
from xscale.convert.hf.longformer import LONGFORMER
from xscale.convert.hf.mxfp4 import quantization_method
from xscale.convert.hf.t5 import SWITCH, T5
from xscale.convert.hf.tables.model_type import GENERAL_KEYS
from xscale.convert.hf.types import bert, deepseek, gemma, glm, gpt_oss, layer_norm, llama, olmo
from xscale.convert.hf.xlnet import XLNET
from xscale.core.config import decode
from xscale.core.errors import ConfigError, Problem
from xscale.core.foreign import foreign_errors
from xscale.nn.model.model import MODELS, Model

ARCHITECTURES = (
    llama.LLAMA.architecture(),
    layer_norm.GPT2.architecture(),
    llama.MISTRAL.architecture(),
    llama.QWEN2.architecture(),
    llama.QWEN3.architecture(),
    llama.MIXTRAL.architecture(),
    llama.QWEN3_MOE.architecture(),
    llama.PHI3.architecture(),
    olmo.OLMO2.architecture(),
    olmo.OLMOE.architecture(),
    gpt_oss.GPT_OSS.architecture(),
    gemma.GEMMA2.architecture(),
    gemma.GEMMA3.architecture(),
    layer_norm.GPT_NEOX.architecture(),
    layer_norm.STARCODER2.architecture(),
    layer_norm.STABLELM.architecture(),
    layer_norm.OPT.architecture(),
    layer_norm.GPT_NEO.architecture(),
    deepseek.DEEPSEEK_V2.architecture(),
    deepseek.DEEPSEEK_V3.architecture(),
    deepseek.GLM4_MOE.architecture(),
    deepseek.DOTS1.architecture(),
    llama.QWEN2_MOE.architecture(),
    llama.MINISTRAL.architecture(),
    llama.CWM.architecture(),
    llama.SEED_OSS.architecture(),
    llama.MINIMAX_M2.architecture(),
    llama.SMOLLM3.architecture(),
    olmo.OLMO3.architecture(),
    olmo.FLEX_OLMO.architecture(),
    deepseek.SOLAR_OPEN.architecture(),
    deepseek.EXAONE4.architecture(),
    deepseek.EXAONE_MOE.architecture(),
    glm.HELIUM.architecture(),
    glm.GLM.architecture(),
    glm.GLM4.architecture(),
    glm.ERNIE4_5.architecture(),
    glm.ERNIE4_5_MOE.architecture(),
    bert.BERT.architecture(),
    bert.ROBERTA.architecture(),
    bert.XLM_ROBERTA.architecture(),
    bert.CAMEMBERT.architecture(),
    bert.ROBERTA_PRELAYERNORM.architecture(),
    bert.BIG_BIRD.architecture(),
    bert.ALBERT.architecture(),
    bert.DISTILBERT.architecture(),
    bert.ELECTRA.architecture(),
    bert.MPNET.architecture(),
    LONGFORMER,
    DEBERTA_V2,
    XLNET,
    T5,
    SWITCH,
    BART,
)
"""In the order in which they are tried."""
KEYS_LISTED = 8
"""Keys of an unknown type that a message lists."""
LENGTH = 512
"""Sequence length if config.json does not give one."""


def architecture_named(name: str, path: str) -> Architecture:
    """Return the architecture of that name; ConfigError if there is none."""
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    known = ", ".join(architecture.name for architecture in ARCHITECTURES)
    raise ConfigError(path, f"no mapping for '{name}'", f"There are mappings for: {known}.")


def architecture_of(data: dict[str, Any]) -> Architecture:
    """Return the architecture of a config.json; ConfigError with the nearest one, and its keys, if there is none."""
    name = str(data.get("model_type"))
    if any(architecture.name == name for architecture in ARCHITECTURES):
        return architecture_named(name, "")
    keys = data.keys() - GENERAL_KEYS
    nearest = max(ARCHITECTURES, key=lambda known: len(keys & known.config_keys))
    unknown = sorted(keys - nearest.config_keys)
    fix = f"The nearest is {nearest.name}, which has {len(keys) - len(unknown)} of its {len(keys)} keys"
    fix += f" and not {', '.join(unknown[:KEYS_LISTED])}" if unknown else ""
    fix += f" and {len(unknown) - KEYS_LISTED} more" if len(unknown) > KEYS_LISTED else ""
    raise ConfigError("config.json: model_type", f"no mapping for '{name}'", f"{fix}.")


def select_architecture(
    model: Model.Config, sizes: ModelSizes, wanted: str | None = None
) -> tuple[Architecture, Data]:
    """Return the first architecture that supports every feature of `model`, and its config.json.

    ConfigError with the keys that `wanted` does not support, or else the architecture with the fewest problems.
    """
    tried: list[tuple[Architecture, list[Problem]]] = []
    for architecture in [architecture_named(wanted, "--architecture")] if wanted else ARCHITECTURES:
        require = Requirements(architecture.name)
        if not require.one_of("model", model.kind, architecture.kind):
            tried.append((architecture, [*require.problems] * len(ARCHITECTURES)))
            continue
        require_features(model, architecture.features, require)
        data = architecture.to_hf(model, sizes, require)
        if not require.problems:
            head = {
                "model_type": architecture.name,
                "architectures": [architecture.loader_of(model)],
                "dtype": "float32",
            }
            return architecture, head | data
        tried.append((architecture, require.problems))
    nearest, problems = min(tried, key=lambda pair: len(pair[1]))
    raise ConfigError(_unique(problems, f"(nearest: {nearest.name})" if not wanted else ""))


def model_from_hf_config(data: dict[str, Any]) -> tuple[Architecture, Data, ModelSizes]:
    """Return the architecture of a config.json, its `model` section and sizes. ConfigError if it cannot be mapped."""
    architecture = architecture_of(data)
    require = Requirements("xscale")
    method = quantization_method(data)
    if method is not None and method not in architecture.quantization:
        fix = "Load it with transformers, `dequantize()` it and save it with `save_pretrained`: that would map."
        require.reject("quantization_config", f"its weights are quantised ({method})", fix)
    with foreign_errors(
        "config.json", f"its values do not describe a model of type {architecture.name}"
    ):
        section = architecture.from_hf(data, require)
    if require.problems:
        raise ConfigError(
            [replace(problem, path=f"config.json: {problem.path}") for problem in require.problems]
        )
    with foreign_errors(
        "config.json", f"its values do not describe a model of type {architecture.name}"
    ):
        length = section["position"].get("length") or data.get("max_position_embeddings") or LENGTH
        sizes = ModelSizes(data["vocab_size"], int(length), data.get("pad_token_id") or 0)
        model = model_of(section)
        problems = MODELS.of(model).part.check(
            model, (sizes.vocabulary, sizes.length), "config.json: model"
        )
    if problems:
        raise ConfigError(problems)
    return architecture, section, sizes


def model_of(section: dict[str, Any]) -> Model.Config:
    """Decode a run's `model` section."""
    config: Model.Config = decode(Section, {"model": section}).model
    return config


def _unique(problems: list[Problem], hint: str) -> list[Problem]:
    return [
        replace(problem, what=f"{problem.what} {hint}".rstrip())
        for problem in dict.fromkeys(problems)
    ]
