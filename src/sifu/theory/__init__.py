"""The mathematics of certified federated unlearning (docs/theory.md, sections 2 to 10): pure functions over numpy."""
