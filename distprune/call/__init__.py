"""One pruning call: read, agree, decide, attach."""
