"""Changes to a finished model: adapters, parametrisations, other maps, and wrappers that observe."""
