"""Requirements of the parts of a recipe on each other, one file for each side, and the check of them all.

Each requirement is a function. Its parameters name the facts that it reads (the sections of the recipe, those of
`xscale.requirements.facts`, the outcome of another requirement), and it returns a problem for each contradiction, with
the changes that may end it. The solver tries these and names those that are accepted (`xscale.requirements.solver`).
"""
