"""Mixtures of experts: routers, the experts' stacked weights, and the seam through which rows reach experts."""

# The experts are made of ffn parts and the ffn family holds the mixture; loading the family first breaks the circle.
import xscale.nn.ffn  # noqa: F401
