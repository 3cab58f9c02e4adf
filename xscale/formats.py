"""The formats of other libraries between which and ours checkpoints are converted, as the command line names them."""

from importlib.util import find_spec

from xscale.core.errors import ConfigError

HF, UNIVERSAL = "hf", "deepspeed-universal"


def format_of(option: str, given: str) -> str:
    """The format `given` to `option`; ConfigError when there is no conversion, or what it needs is not installed."""
    if given not in (HF, UNIVERSAL):
        raise ConfigError(option, f"there is no conversion for '{given}'", f"There is one for {HF} and {UNIVERSAL}.")
    if given == HF and find_spec("transformers") is None:
        raise ConfigError(option, "the transformers library is not installed", "pip install 'xscale[hf]'")
    return given
