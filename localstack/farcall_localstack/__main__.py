from farcall_common.exit_codes import raise_on_sigterm
from farcall_localstack.cli import app

raise_on_sigterm()
app(prog_name="python -m farcall_localstack")
