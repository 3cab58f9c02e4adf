"""Compiled code, kept with the run: a run that is started again, on whatever nodes, compiles nothing anew.

`compile_cache/` in the run folder has a file for each pipeline stage and tensor-parallel rank: the artifacts of
Inductor, AOTAutograd, Triton and autotuning, by `torch.compiler.save_cache_artifacts`. torch takes those whose code and
device are the same. They are code, and a run folder is trusted for numbers only: a file counts if a key that is in the
home of this user alone has signed it.
"""

import hashlib
import hmac
import secrets
from contextlib import suppress
from pathlib import Path

import torch

from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.file_safety import make_private_file, make_private_folder
from xscale.core.files.run_files import make_run_folder, read_run_file
from xscale.mesh import torch_private
from xscale.mesh.environment import settings_folder
from xscale.mesh.mesh import Mesh

FOLDER = "compile_cache"
"""The folder in that of the run."""
SIGNATURE_BYTES = hashlib.sha256().digest_size
MOST_BYTES = 4 << 30
"""Largest file that is loaded."""


class CompileArtifacts:
    """The artifacts of this rank in a run folder. All it does is to save time: what it cannot do, it says."""

    def __init__(
        self, run: Path, mesh: Mesh, *, enabled: bool, settings: Path | None = None
    ) -> None:
        """`enabled`: whether the run compiles. `settings`: the folder of this user's key; None: that in the home."""
        self.run, self.enabled = run, enabled
        self._key_file = (settings_folder() if settings is None else settings) / "compile.key"
        coordinates = _coordinates(mesh)
        self._name = f"pp{coordinates.pop('pp', 0)}-tp{coordinates.pop('tp', 0)}"
        # Ranks that differ in their samples or their shards of a sequence alone compile the same.
        self._writes = not any(coordinates.values())
        self._saved_graphs = 0

    def load(self) -> list[str]:
        """Give torch the artifacts of the run before it compiles; return what is to be said of them."""
        if not self.enabled or not (self.run / FOLDER).is_dir():
            return []
        path = self.run / FOLDER / self._name
        try:
            signed = read_run_file(path, MOST_BYTES)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            return [f"the compiled code in {path} is not used: {error}"]
        key = self._key()
        content = signed[SIGNATURE_BYTES:]
        if key is None or not hmac.compare_digest(
            signed[:SIGNATURE_BYTES], _signature(key, content)
        ):
            return [
                f"the compiled code in {path} is not used: it is not from a run of this user, or damaged"
            ]
        loaded = torch.compiler.load_cache_artifacts(content)
        if loaded is None:
            return [f"the compiled code in {path} is not used: this torch cannot read it"]
        count = sum(map(len, loaded.artifacts.values()))
        return [f"loaded {count} compiled artifacts of earlier starts of the run"]

    def save(self) -> None:
        """Keep what torch has compiled, if that is more than at the last call."""
        if not self.enabled or not self._writes:
            return
        graphs = int(torch_private.dynamo_counters["stats"]["unique_graphs"])
        if graphs == self._saved_graphs:
            return
        self._saved_graphs = graphs
        artifacts, key = torch.compiler.save_cache_artifacts(), self._key(make=True)
        if artifacts is None or key is None:
            return
        content, _ = artifacts
        # A full disk or a folder that is gone ends a run elsewhere; here it costs the next start a minute.
        with suppress(OSError):
            folder = make_run_folder(self.run, FOLDER)
            write_atomically(folder / self._name, _signature(key, content) + content)

    def _key(self, *, make: bool = False) -> bytes | None:
        """Return this user's key; None: there is none, and none can be made."""
        with suppress(OSError, ValueError):
            return read_run_file(self._key_file)
        if not make:
            return None
        with suppress(OSError):
            make_private_folder(self._key_file.parent)
            # The first of several processes makes it.
            make_private_file(self._key_file, secrets.token_bytes(32))
        with suppress(OSError, ValueError):
            return read_run_file(self._key_file)
        return None


def _coordinates(mesh: Mesh) -> dict[str, int]:
    """Return this rank's coordinate on each axis of the mesh; empty for one process."""
    if mesh.dense is None:
        return {}
    names, coordinates = mesh.dense.mesh_dim_names, mesh.dense.get_coordinate()
    assert names is not None, "the axes have names"
    assert coordinates is not None, "the rank is on the mesh"
    return dict(zip(names, coordinates, strict=True))


def _signature(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")
