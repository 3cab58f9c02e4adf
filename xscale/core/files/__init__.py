"""Writing and opening files safely: atomic, locked, inside their folder."""
