"""Lambda handlers of the Farcall control plane: API, authorizer, reconciler, migrator."""
