"""Commands on checkpoints: list, verify, convert, merge, upcycle."""
