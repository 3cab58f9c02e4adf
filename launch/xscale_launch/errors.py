"""What the launcher says when the person who called it has to change something."""


class LaunchError(Exception):
    """The user's mistake: one or more sentences that end in what would work. The launcher exits with status 2."""
