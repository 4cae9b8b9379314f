"""Life cycle of a request: reception, approval, execution, certification and erasure."""
