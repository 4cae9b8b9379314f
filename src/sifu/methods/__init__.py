"""Unlearning methods: each decides what happens at a request, and speaks only to an engine and the store."""
