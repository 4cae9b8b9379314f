"""Mathematics of certified federated unlearning (docs/theory.md, sections 2 to 15), as pure numpy functions."""
