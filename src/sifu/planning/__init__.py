"""What a request would do and cost, predicted from what is recorded."""
