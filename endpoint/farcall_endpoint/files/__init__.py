"""Files of tasks: copied to the endpoint before a task is queued, and stored from there after its function returned.

``plan``, ``orders`` and ``room`` decide (no I/O, in the agent), ``client`` and ``process`` are both ends of the
transfer process, ``cache`` has the copies, ``movers`` speak with storage.
"""
