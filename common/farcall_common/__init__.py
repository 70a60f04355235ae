"""Code that all parts of Farcall share: errors, wire protocol, user payloads, cloud stores."""
