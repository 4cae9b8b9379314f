"""Programs that run whole experiments on a GPU: many runs (lanes) with many clients each."""
