"""Pipeline parallelism (Huang et al. 2019): ranks share the depth, and micro-batches pass through their stages."""

from xscale.parallel.pipeline.build import apply
from xscale.parallel.pipeline.check import check, check_micro_batches
from xscale.parallel.pipeline.estimate import estimate

__all__ = ["apply", "check", "check_micro_batches", "estimate"]
