"""Unlearning methods: each decides what a request does, and uses only an engine and the store."""
