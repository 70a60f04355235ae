"""The agent: one per endpoint; holds the connection to the cloud and answers for the tasks that it accepted."""
