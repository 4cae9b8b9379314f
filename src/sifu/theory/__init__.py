"""The mathematics of certified federated unlearning (docs/theory.md): pure functions over numpy."""
