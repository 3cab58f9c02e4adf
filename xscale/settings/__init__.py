"""Every section of a run's config, and what models of these sections can read."""
