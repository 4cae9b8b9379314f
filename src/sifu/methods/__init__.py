"""Unlearning methods, which plan requests and make the models that retraining starts from."""
