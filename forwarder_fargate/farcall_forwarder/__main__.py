"""``python -m farcall_forwarder``: one forwarder, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import signal
import sys

from farcall_common.errors import ConfigurationError
from farcall_common.store.settings import StoreSettings, open_stores
from farcall_forwarder import logs
from farcall_forwarder.adapters.connection_limiter import allow_connections
from farcall_forwarder.service import Service
from farcall_forwarder.settings import Settings

try:
    import uvloop
except ImportError:  # no wheel for this machine; asyncio's own loop does the same, slower
    new_event_loop = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop

#: Allocations between two runs of the cyclic garbage collector. Tasks leave no cycles, so that reference counts free
#: almost everything; but each run on the oldest generation visits every connection and every task under way.
_GC_THRESHOLDS = (50_000, 20, 100)


async def _serve(service: Service) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.drain)
    loop.add_signal_handler(signal.SIGUSR1, service.write_event_log)
    await service.run()


def main() -> int:
    """Run the process; its exit status is 0 after a drain, 1 after an error, 2 for a wrong setting."""
    try:
        settings = Settings.read(sys.argv[1:], os.environ)
        logs.set_up(settings.log_level)
        settings = dataclasses.replace(settings, max_connections=allow_connections(settings.max_connections))
        stores = open_stores(StoreSettings.from_environment(os.environ), max_connections=settings.database_connections)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    gc.freeze()  # modules and settings live as long as the process
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_serve(Service(settings, settings.policy, stores)))
    except BaseExceptionGroup:
        logging.getLogger(__name__).critical("died", exc_info=True)
        return 1
    finally:
        stores.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
