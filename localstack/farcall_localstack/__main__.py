from farcall_localstack.cli import app

app(prog_name="python -m farcall_localstack")
