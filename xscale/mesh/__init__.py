"""Who is where: axes as arithmetic, process groups, collectives. Knows nothing of models."""
