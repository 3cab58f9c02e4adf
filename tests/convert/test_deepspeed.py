"""Universal checkpoints: DeepSpeed loads ours, ours are made of what its own converter wrote; bit for bit."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.commands.test_import_hf import call
from tests.distributed import Pool
from tests.parallel.engine.test_deepspeed import forget
from tests.train.tiny import recipe, run
from xscale.checkpoint.load import load_tensors, read_state
from xscale.core.errors import ConfigError
from xscale.mesh.collectives import barrier
from xscale.nn.materialize import materialize
from xscale.settings.settings import build_on_meta

MODEL: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "stack": {"depth": 2, "block": {"mixer": {"kind": "attention", "heads": 4, "kv_heads": 2, "bias": True}}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("universal")
    assert run(recipe(folder, model=MODEL)) == 0
    return folder


def theirs(folder: Path, vocabulary: int, stage: int) -> dict[str, Tensor]:
    """DeepSpeed's own engine loads the export, and its checkpoint is converted by its own converter."""
    forget()
    import deepspeed
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = build_on_meta(recipe(folder, model=MODEL), vocabulary)
    materialize(model, seed=99)
    matrices = [one for one in model.parameters() if one.dim() > 1]
    vectors = [one for one in model.parameters() if one.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    told = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "memory_efficient_linear": False, "override_module_apply": False},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": True},
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=told, dist_init_required=False)
    path, _ = engine.load_checkpoint(str(folder), tag="exported")
    assert path is not None
    found = {}
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = safe_get_full_fp32_param(parameter)
        found[f"optimizer.mean.{name}"] = safe_get_full_optimizer_state(parameter, "exp_avg")
        found[f"optimizer.square.{name}"] = safe_get_full_optimizer_state(parameter, "exp_avg_sq")
    engine.save_checkpoint(str(folder / f"theirs{stage}"), tag="saved")
    barrier()
    if torch.distributed.get_rank() == 0:
        given = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        folders = {"input_folder": f"{folder}/theirs{stage}/saved", "output_folder": f"{folder}/converted{stage}"}
        ds_to_universal.main(Namespace(**folders, **given, inject_missing_state=True))
    barrier()
    return found


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2])
def test_out_through_deepspeed_and_in_again(stage: int, trained: Path, pool: Pool, tmp_path: Path) -> None:
    if not (trained / "exported").exists():
        status, said = call(
            "checkpoint", "export", trained / "run", trained / "exported", "--to", "deepspeed-universal"
        )
        assert status == 0
        assert "bit for bit" in said
    ours = load_tensors(trained / "run" / "checkpoints" / "step-00000006")
    found = pool.run(theirs, 2, trained, ours["model.embed.table.weight"].shape[0], stage)[0]
    assert found.keys() == ours.keys()
    assert all(torch.equal(found[name], value) for name, value in ours.items())
    again, config = tmp_path / "again", trained / "run" / "config.yaml"
    words = ("checkpoint", "import", trained / f"converted{stage}", again, config, "--from", "deepspeed-universal")
    status, said = call(*words)
    assert status == 0, said
    back = load_tensors(again / "checkpoints" / "step-00000000")
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], value) for name, value in ours.items())
    assert read_state(again / "checkpoints" / "step-00000000")["optimizer"] == {"step": 6}


def test_what_does_not_fit_is_said(trained: Path, tmp_path: Path) -> None:
    assert call("checkpoint", "export", trained / "run", tmp_path / "out", "--to", "deepspeed-universal")[0] == 0
    config = trained / "run" / "config.yaml"
    from_it = ("--from", "deepspeed-universal")
    with pytest.raises(ConfigError, match="Give the run's config"):
        call("checkpoint", "import", tmp_path / "out", tmp_path / "new", *from_it)
    with pytest.raises(ConfigError, match=r"which the model lacks"):
        call("checkpoint", "import", tmp_path / "out", tmp_path / "new", config, "model.stack.depth=1", *from_it)
    with pytest.raises(ConfigError, match=r"it lacks"):
        call("checkpoint", "import", tmp_path / "out", tmp_path / "new", config, "model.stack.depth=3", *from_it)
    with pytest.raises(ConfigError, match="no universal checkpoint"):
        call("checkpoint", "import", tmp_path, tmp_path / "new", config, *from_it)
    next((tmp_path / "out" / "zero").glob("*/exp_avg.pt")).write_bytes(b"x")
    with pytest.raises(ConfigError, match="cannot be read"):
        call("checkpoint", "import", tmp_path / "out", tmp_path / "new", config, *from_it)
    with pytest.raises(ConfigError, match="already exists"):
        call("checkpoint", "export", trained / "run", tmp_path / "out", "--to", "deepspeed-universal")
    with pytest.raises(ConfigError, match="hf, deepspeed-universal or megatron"):
        call("checkpoint", "export", trained / "run", tmp_path / "other", "--to", "onnx")
    assert not (tmp_path / "new").exists()
