"""Services of an endpoint around its tasks: the cloud, directories on disk, the sweeper and Valkey servers."""
