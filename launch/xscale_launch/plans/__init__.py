"""Questions to `xscale plan` before a submission, and their cached answers."""
