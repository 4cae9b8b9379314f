"""Hand-written training of convolutional networks on the CPU."""
