"""The terminal: streams, completion, and the groups and options that commands have in common."""
