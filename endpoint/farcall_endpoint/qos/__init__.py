"""Latency targets of functions: actuators, which give the processes of functions their shares of the CPUs of a node."""

from farcall_endpoint.qos.actuators import Actuator, Choice, NoActuator, choose

__all__ = ["Actuator", "Choice", "NoActuator", "choose"]
