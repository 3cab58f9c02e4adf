"""Law 6: every random draw inside a model goes through `xscale.nn.random`, which knows the layout."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.laws.bent import unbent
from tests.laws.tree import ROOT, File, dotted, files, meaning, plant

HOME, SEAM = "xscale/nn/random.py", "xscale/nn/module.py"
"""Where draws are made, and where every module gets its own."""
PACKAGES = frozenset({"nn", "xscale_kernels"})
NO_MODEL = ("bench", "bench.py", "cases.py", "example.py", "examples.py")
"""Files and folders of the kernels that make inputs for measurements and tests."""
TORCH = (
    "rand rand_like randn randn_like randint randint_like randperm bernoulli multinomial normal poisson binomial "
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout native_dropout gumbel_softmax rrelu "
    "rand4x randint4x fractional_max_pool2d scaled_dot_product_attention manual_seed seed Generator fork_rng "
    "set_rng_state get_rng_state Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout RReLU"
)
FUNCTIONS = frozenset(TORCH.split())
"""Names that torch and Triton give to what draws, or moves a generator."""
TENSOR = (
    "bernoulli bernoulli_ multinomial uniform_ normal_ exponential_ geometric_ cauchy_ log_normal_ random_ "
    "manual_seed_all"
)
METHODS = frozenset(TENSOR.split())
"""Methods of a tensor that draw, whatever the tensor is called."""
LIBRARIES = ("torch.", "triton.")
WITHOUT_SEED = ("numpy.random.", "random.")
"""Files whose draws come from a seed in the config alone may use numpy's generators."""


def violations(root: Path) -> dict[str, str]:
    found = {}
    for file in files(root):
        if file.package in PACKAGES and file.path != HOME and not set(file.path.split("/")) & set(NO_MODEL):
            for node, name in [*draws(file), *kernel_imports(file)]:
                found[file.at(node, name)] = f"{name}: draw by Module.random (xscale.nn.random), which knows the layout"
    return found


def draws(file: File) -> Iterator[tuple[ast.AST, str]]:
    """Calls, and mentions as a base class or a value, of what draws."""
    names = meaning(file)
    for node in file.nodes:
        if isinstance(node, ast.Attribute | ast.Name):
            first, *rest = dotted(node).split(".")
            full = ".".join([names.get(first, ""), *rest])
            last = full.split(".")[-1]
            if full.startswith(LIBRARIES) and (last in FUNCTIONS or ".init." in full):
                yield node, last
            elif full.startswith(WITHOUT_SEED) and last not in ("default_rng", "Random", "Generator"):
                yield node, full
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                yield node, node.func.attr
            if dotted(node.func).split(".")[-1] in ("default_rng", "Random") and not node.args + node.keywords:
                yield node, f"{dotted(node.func)} without a seed"
            if dotted(node.func).split(".")[-1] == "RandomNumbers" and file.path != SEAM:
                yield node, "RandomNumbers"


def kernel_imports(file: File) -> Iterator[tuple[ast.AST, str]]:
    """Imports of the one kernel that draws."""
    for node in file.nodes:
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("xscale_kernels.bias_dropout_residual") and file.package == "nn":
            yield node, "bias_dropout_residual"


def test_draws_go_through_one_place() -> None:
    assert unbent("random draws", violations(ROOT)) == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ndef forward(x): return x * torch.rand_like(x)",
        "import torch.nn.functional as F\ndef forward(x): return F.dropout(x, 0.1)",
        "from torch.nn.functional import dropout as drop\ndef forward(x): return drop(x)",
        "from torch import nn\nclass A:\n    def __init__(self): self.drop = nn.Dropout(0.1)",
        "import torch\ndef forward(x): return torch.nn.functional.gumbel_softmax(x)",
        "def forward(x): return x.new_empty(3).exponential_()",
        "def forward(x): return x.bernoulli(0.5)",
        "def forward(p): return p.multinomial(1)",
        "import torch\ndef forward(x): return torch.nn.init.normal_(x)",
        "import torch.nn.functional as F\ndef f(q): return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)",
        "import torch\ndef forward(x): torch.manual_seed(0)",
        "import torch\nSAMPLE = torch.randperm",
        "import numpy as np\ndef forward(x): return np.random.permutation(3)",
        "import numpy as np\ndef forward(x): return np.random.default_rng().random()",
        "import random\ndef forward(x): return random.random()",
        "from xscale.nn.random import RandomNumbers\ndef forward(x): return RandomNumbers().dropout(x, 0.1, ())",
        "from xscale_kernels.bias_dropout_residual.op import bias_dropout_residual",
    ],
)
def test_another_draw_is_seen(tmp_path: Path, line: str) -> None:
    assert violations(plant(tmp_path, xscale__nn__bad=line))
    assert "xscale_kernels" in line or violations(plant(tmp_path / "k", kernels__xscale_kernels__bad=line))


def test_draws_through_the_seam_pass(tmp_path: Path) -> None:
    text = """
import numpy as np
def forward(self, x):
    order = np.random.default_rng(self.seed).permutation(3)
    return self.random.dropout(x + self.random.normal(x, DIMS), 0.1, DIMS)
"""
    plant(tmp_path, xscale__nn__good=text, xscale__nn__random="import torch\nx = torch.rand(1)")
    assert violations(plant(tmp_path, kernels__xscale_kernels__bench="import torch\nx = torch.rand(1)")) == {}
