"""From prepared data to samples: packing, pairs, labels, sentences, blending and the loader."""
