from farcall_common.interruption import heed_sigterm
from farcall_localstack.cli import app

heed_sigterm()
app(prog_name="python -m farcall_localstack")
