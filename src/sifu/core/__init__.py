"""The mathematics of certified federated unlearning: pure functions and frozen dataclasses over numpy."""
