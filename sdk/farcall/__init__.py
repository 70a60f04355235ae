"""Call a Python function on any computer you may use: client, executor and command line of Farcall."""
