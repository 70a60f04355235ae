"""Analytics: sorts through each method of exchange, on storages with the limits of a cloud's, and beside peers."""
