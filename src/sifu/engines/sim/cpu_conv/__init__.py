"""Training of convolutional networks on the CPU with hand-written forward and backward passes."""
