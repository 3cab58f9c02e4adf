"""`python -m xscale_launch ...` is `xscale launch ...`."""

import sys

from xscale_launch.main import main

sys.exit(main(sys.argv[1:]))
