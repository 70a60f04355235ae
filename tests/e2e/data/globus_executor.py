"""Let Globus Compute's Executor submit a call: ``python globus_executor.py API_URL TOKEN ENDPOINT_ID``.

Writes the error that its future ends with as JSON to standard output.
"""

import json
import sys

import globus_sdk
from globus_compute_sdk import Client, Executor
from globus_compute_sdk.sdk import client as sdk_client


def double(x):
    return 2 * x


def main():
    api_url, token, endpoint_id = sys.argv[1:]
    sdk_client.get_web_service_url = lambda environment=None: api_url
    client = Client(authorizer=globus_sdk.AccessTokenAuthorizer(token), do_version_check=False)
    executor = Executor(endpoint_id, client=client)
    error = executor.submit(double, 2).exception(timeout=60)
    executor.shutdown(wait=False, cancel_futures=True)
    json.dump({"error": str(error)}, sys.stdout)


if __name__ == "__main__":
    main()
