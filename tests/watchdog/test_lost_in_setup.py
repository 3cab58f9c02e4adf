"""A rank that fails alone in the set-up says why, and the others say in a sentence that it ended."""

import pytest
import torch.distributed as dist

from xscale.core.errors import ConfigError, FaultError
from xscale.mesh.consensus import RankError
from xscale.watchdog.watchdog import naming_lost_ranks

GLOO = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
ERRORS: dict[str, tuple[Exception, type[Exception]]] = {
    "contact that is lost in a consensus": (RankError("data: lost contact with another rank"), FaultError),
    "a collective of gloo": (RuntimeError(GLOO), FaultError),
    "a collective of another backend": (dist.DistBackendError("NCCL error"), FaultError),
    "a fault of this rank": (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
    "a refusal": (ConfigError("run.dir", "is bad"), ConfigError),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_said_of_an_error(case: str) -> None:
    error, kind = ERRORS[case]
    with pytest.raises(kind) as raised, naming_lost_ranks():
        raise error
    assert type(raised.value) is type(error) or str(raised.value).endswith(". The message of that rank says why")
