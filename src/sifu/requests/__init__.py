"""The life of a request: taken in, carried out, certified, erased."""
