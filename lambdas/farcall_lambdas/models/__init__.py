"""The shapes of requests and answers. Where Globus Compute has a shape, this is it."""
