"""What Globus Flows asks of an action provider, by the published client of actions, and checked by the published schema
and models; run by a Python that has them (flows-requirements.txt).

Arguments: the address of the API, the tokens of two people, the second one's identity, and the ids of an endpoint of
the first one that runs, of one that never does, and of the functions add, fail and unreadable. Writes what it saw as
JSON to standard output.
"""

import json
import sys
import time
import uuid

import globus_sdk
from globus_action_provider_tools.data_types import ActionLogReturn, ActionProviderDescription, ActionStatus
from globus_action_provider_tools.validation import ValidationRequest, response_validator
from globus_automate_client.action_client import ActionClient

WITHIN_S = 200


def client_of(address, token):
    client = ActionClient.new_client(f"{address}/actions", globus_sdk.AccessTokenAuthorizer(token))
    client.transport.max_retries = 0
    return client


def checked(answer):
    """The data of an action's answer, as the published schema and model have it."""
    found = response_validator(ValidationRequest("ActionStatus", answer.data))
    assert not found.errors, found.errors
    ActionStatus(**answer.data)
    return answer.data


def ended(client, action_id):
    deadline = time.monotonic() + WITHIN_S
    while (seen := checked(client.status(action_id)))["status"] == "ACTIVE":
        assert time.monotonic() < deadline, seen
        time.sleep(0.2)
    return seen


def refused(call, *arguments, **keywords):
    """Status and code of a refusal."""
    try:
        answer = call(*arguments, **keywords)
    except globus_sdk.GlobusAPIError as error:
        body = json.loads(error.text)
        assert body["description"], body
        return [error.http_status, body["code"]]
    raise AssertionError(answer.data)


def main(address, ada_token, grace_token, grace_id, endpoint, idle, add, fail, unreadable):
    ada, grace = client_of(address, ada_token), client_of(address, grace_token)
    described = ada.introspect().data
    ActionProviderDescription(**described)
    seen = {"title": described["title"], "scope": described["globus_auth_scope"]}

    # The form of https://compute.actions.globus.org/v3, and repeating it.
    request_id = str(uuid.uuid4())
    tasks = [{"function_id": add, "args": [1, 2]}, {"function_id": add, "kwargs": {"x": [1], "y": [2]}}]
    body = {"endpoint_id": endpoint, "tasks": tasks}
    started = ada.run(
        body, request_id=request_id, label="Beam 7 <b>", monitor_by=[f"urn:globus:auth:identity:{grace_id}"]
    )
    action_id = checked(started)["action_id"]
    seen["started"] = [started.http_status, started.data["label"]]
    done = ended(ada, action_id)
    seen["result"] = [done["status"], done["details"]["result"], done["display_status"]]
    seen["same outputs"] = [each["output"] for each in done["details"]["results"]] == done["details"]["result"]
    again = ada.run(
        body, request_id=request_id, label="Beam 7 <b>", monitor_by=[f"urn:globus:auth:identity:{grace_id}"]
    )
    seen["repeated"] = checked(again)["action_id"] == action_id
    seen["reused"] = refused(ada.run, {"endpoint_id": endpoint, "tasks": tasks[:1]}, request_id=request_id)
    seen["of another user"] = checked(grace.status(action_id))["details"]["result"]
    seen["not to manage"] = [refused(grace.cancel, action_id), refused(grace.release, action_id)]
    first = ada.log(action_id, limit=3).data
    ActionLogReturn(**first)
    rest = ada.log(action_id, limit=100, marker=first["marker"]).data
    ActionLogReturn(**rest)
    codes = [each["code"] for each in [*first["entries"], *rest["entries"]]]
    seen["log"] = [len(first["entries"]), first["has_next_page"], rest["has_next_page"], codes.count("success")]

    # The form of https://compute.actions.globus.org.
    older = {"endpoint": endpoint, "function": add, "kwargs": {"x": "a", "y": "b"}}
    older["tasks"] = [{"endpoint": endpoint, "function": add, "args": "[3]", "payload": '{"y": 4}'}]
    seen["older form"] = ended(ada, ada.run(older).data["action_id"])["details"]["result"]

    failed = ended(ada, ada.run({"endpoint_id": endpoint, "tasks": [{"function_id": fail}]}).data["action_id"])
    seen["failed"] = [failed["status"], failed["details"]["code"], "not here" in failed["details"]["description"]]
    bytes_ = ended(ada, ada.run({"endpoint_id": endpoint, "tasks": [{"function_id": unreadable}]}).data["action_id"])
    seen["unreadable"] = [bytes_["status"], bytes_["details"]["results"][0]["reason"], bytes_["details"]["result"]]

    waiting = ada.run(
        {"endpoint_id": idle, "tasks": [{"function_id": add, "args": [1]}]},
        manage_by=[f"urn:globus:auth:identity:{grace_id}"],
    ).data["action_id"]
    active = checked(ada.status(waiting))
    seen["waiting"] = [active["status"], active["details"]["results"][0]["why"].partition(":")[0]]
    seen["foreign"] = [refused(grace.status, waiting), refused(grace.log, waiting)]
    seen["release too early"] = refused(grace.release, waiting)
    cancelled = ended(ada, checked(grace.cancel(waiting))["action_id"])
    seen["cancelled"] = [cancelled["status"], cancelled["details"]["code"], cancelled["display_status"]]
    seen["released"] = checked(grace.release(waiting))["status"]
    seen["gone"] = refused(ada.status, waiting)
    seen["unknown"] = [refused(ada.status, str(uuid.uuid4())), refused(ada.cancel, "nothing")]
    seen["malformed"] = [
        refused(ada.run, {"endpoint_id": endpoint}),
        refused(ada.run, {"endpoint_id": endpoint, "tasks": [{"function_id": add}]}, label="x" * 65),
        refused(ada.run, {"endpoint_id": str(uuid.uuid4()), "tasks": [{"function_id": add}]}),
    ]
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
