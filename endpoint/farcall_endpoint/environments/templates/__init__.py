"""Templates: processes that workers are forked from."""
