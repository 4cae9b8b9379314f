"""Plans: the effect and cost of a request, predicted from the record of a run."""
