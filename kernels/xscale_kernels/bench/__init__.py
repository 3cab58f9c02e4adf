"""Times of operators beside their baselines, reported only when the operator's tests are green."""

from xscale_kernels.bench.case import Case, both_ways
from xscale_kernels.bench.report import NotGreenError, Row, record, run, table

__all__ = ["Case", "NotGreenError", "Row", "both_ways", "record", "run", "table"]
