"""The Lambda handlers. Each reads its settings once, on the first call, and keeps its connections."""

from typing import Final

#: Seconds that a function waits for a sign of life from the database. A server that was lost while the function was
#: frozen must not cost the next request all of its time.
SILENCE_S: Final = 4.0
