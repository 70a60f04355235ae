"""The Fargate service that holds the ZeroMQ connections of Farcall endpoints and clients."""
