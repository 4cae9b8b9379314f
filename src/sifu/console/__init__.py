"""The operator's desk: who may do what (`roles`, `tokens`)."""
