"""A program of Globus Compute's own SDK, unmodified but for the service's address; run by a Python that has that SDK.

Arguments: the address of the API, a token, an endpoint's id. Writes what it saw as JSON to standard output.
"""

import json
import sys
import time
import warnings

import globus_sdk
from globus_compute_sdk import Client
from globus_compute_sdk.errors import TaskExecutionFailed
from globus_compute_sdk.sdk import client as module
from globus_compute_sdk.serialize import AllCodeStrategies, CombinedCode, ComputeSerializer, JSONData

WITHIN_S = 60
LARGE = 100_000  # what our own SDK is sent as bytes; this one gets what it reads


def add(x, y=0):
    return x + y


def divmod_of(a, b):
    return divmod(a, b)


def large(count):
    return bytes(count)


def fail():
    raise KeyError("not here")


def result_of(client, task_id):
    deadline = time.monotonic() + WITHIN_S
    while client.get_task(task_id)["pending"]:
        if time.monotonic() > deadline:
            raise TimeoutError(task_id)
        time.sleep(0.05)
    return client.get_result(task_id)


def main(address, token, endpoint_id):
    module.get_web_service_url = lambda environment=None: address
    client = Client(authorizer=globus_sdk.AccessTokenAuthorizer(token))  # asks for the service's version
    seen = {"status": client.get_endpoint_status(endpoint_id)["status"]}
    seen["metadata"] = client.get_endpoint_metadata(endpoint_id)["uuid"] == endpoint_id
    seen["endpoints"] = endpoint_id in [each["uuid"] for each in client.get_endpoints()]

    function_id = client.register_function(add)
    seen["function"] = client.get_function(function_id)["function_name"]
    seen["warnings"] = []
    warnings.showwarning = lambda message, *_: seen["warnings"].append(str(message))
    seen["run"] = result_of(client, client.run(3, y=4, endpoint_id=endpoint_id, function_id=function_id))

    batch = client.create_batch()
    for number in range(20):
        batch.add(function_id, args=(number,), kwargs={"y": 1})
    [task_ids] = client.batch_run(endpoint_id, batch)["tasks"].values()
    seen["batch"] = [result_of(client, task_id) for task_id in task_ids]
    ends = client.get_batch_result(task_ids)
    seen["batch_result"] = [ends[task_id]["result"] for task_id in task_ids]

    large_id = client.register_function(large)
    pair_id = client.register_function(divmod_of)
    seen["pair"] = result_of(client, client.run(7, 2, endpoint_id=endpoint_id, function_id=pair_id)) == (3, 1)
    seen["large"] = len(result_of(client, client.run(LARGE, endpoint_id=endpoint_id, function_id=large_id)))

    failing = client.run(endpoint_id=endpoint_id, function_id=client.register_function(fail))
    try:
        result_of(client, failing)
    except TaskExecutionFailed as error:
        seen["failure"] = str(error)

    other = Client(
        authorizer=client.authorizer, code_serialization_strategy=CombinedCode(), data_serialization_strategy=JSONData()
    )
    text_id = other.register_function(add)
    seen["json"] = result_of(other, other.run([1], y=[2], endpoint_id=endpoint_id, function_id=text_id))
    client.fx_serializer = ComputeSerializer(strategy_code=AllCodeStrategies())
    all_id = client.register_function(add)
    seen["all_strategies"] = result_of(client, client.run("a", y="b", endpoint_id=endpoint_id, function_id=all_id))

    try:
        client.run(endpoint_id=endpoint_id, function_id="00000000-0000-4000-8000-000000000000")
    except globus_sdk.GlobusAPIError as error:
        seen["unknown_function"] = [error.http_status, str(error)]
    client.delete_function(function_id)
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
