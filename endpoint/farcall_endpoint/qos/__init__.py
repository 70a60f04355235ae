"""Quality of service: how long functions take at an endpoint, policies of weights, and actuators, which give the
processes of functions their shares of the CPUs of a node."""
