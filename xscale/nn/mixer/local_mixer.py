"""Base class of mixers that read a fixed number of tokens before and after each token, such as convolutions."""

from xscale.nn.mixer.mixer import Mixer
from xscale.nn.neighbours import NeighbourReader


class LocalMixer(NeighbourReader, Mixer):
    """A mixer that is a neighbour reader and nothing else."""

    shards_sequence = True
