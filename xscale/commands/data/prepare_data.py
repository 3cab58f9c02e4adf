"""`xscale data prepare`: in one process with a pool of workers, or distributed over the ranks of a job."""

import datetime
from pathlib import Path

from xscale.core.errors import FaultError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepare import prepare as prepare_in_one_process
from xscale.data.corpus.prepare import prepare_distributed
from xscale.data.corpus.prepared import PreparedData
from xscale.mesh.environment import RankInfo

TIMEOUT = datetime.timedelta(days=2)
"""Training a tokenizer may take long; a rank that dies is noticed by its closed connection."""


def prepare(config: DataConfig, rank_info: RankInfo) -> PreparedData:
    """Tokenise the config's source. Collective: each of several ranks tokenises some shards."""
    if rank_info.is_single_process:
        return prepare_in_one_process(config)
    from xscale.mesh.consensus import Consensus, RankError
    from xscale.mesh.mesh import init_process_group, leave_process_group

    init_process_group(rank_info, "gloo", TIMEOUT)
    ranks, folder = Consensus(doing="prepared"), Path(config.folder)
    try:
        return prepare_distributed(
            config, rank_info.rank, rank_info.world, lambda work: ranks.on_all(folder, work)
        )
    except RankError as error:
        raise FaultError(
            f"{error}. Run the same command to resume from the finished shards."
        ) from None
    finally:
        leave_process_group()
