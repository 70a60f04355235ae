"""Reads a task of another SDK with that of Globus Compute.

Arguments: the address of the API, a token, a task's id. Writes what came of it as JSON to standard output.
"""

import json
import sys

import globus_sdk
from globus_compute_sdk import Client
from globus_compute_sdk.errors import TaskExecutionFailed
from globus_compute_sdk.sdk import client as module


def main(address, token, task_id):
    module.get_web_service_url = lambda environment=None: address
    client = Client(authorizer=globus_sdk.AccessTokenAuthorizer(token))
    try:
        seen = {"result": client.get_result(task_id)}
    except TaskExecutionFailed as error:
        seen = {"error": str(error)}
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
