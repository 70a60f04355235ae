"""Agent of an endpoint: connects to the cloud, and keeps accepted tasks until their results are recorded."""
