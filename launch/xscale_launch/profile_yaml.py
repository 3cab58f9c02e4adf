"""The profiles' file as YAML, for who keeps all configs in it: needs PyYAML, which every installation of xscale has.

A bare login node's Python has none; clusters.toml is read there.
"""

import re
from pathlib import Path
from typing import Any, get_args

from xscale_launch.errors import LaunchError


def read(path: Path) -> Any:
    """The file's content, every scalar a text: YAML would make 43200 of the time limit 12:00:00, and false of `no`."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise LaunchError(
            f"{path} is YAML, and this Python has no PyYAML: pip install pyyaml, or write the same as clusters.toml"
        ) from None
    try:
        return yaml.load(path.read_text(), Loader=yaml.BaseLoader) or {}
    except yaml.YAMLError as error:
        raise LaunchError(f"{path} is no YAML: {' '.join(str(error).split())}") from None


def as_typed(hint: Any, text: Any) -> Any:
    """A scalar's text as the number or the truth value that its field wants; anything else as it is."""
    kinds = get_args(hint) or (hint,)
    if not isinstance(text, str) or str in kinds:
        return text
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    if int in kinds and re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    if float in kinds and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
        return float(text)
    return text
