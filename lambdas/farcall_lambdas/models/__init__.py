"""Shapes of requests and answers: those of Globus Compute where it has one."""
