"""Every call at every port of every pod is refused without the experiment's token."""

from __future__ import annotations

import json

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import ClusterExperiment, Namespace
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

INTRUDER = """
import grpc, json, sys, urllib.error, urllib.request
from rlsrl.parameters.service.transfers import TRANSFERS
from rlsrl.rpc.v1 import coordinator_pb2, parameters_pb2
from rlsrl.streams.grpc_inference import wire as inference
from rlsrl.streams.grpc_samples import wire as samples
PATHS = [samples.METHOD, inference.METHOD]
PATHS += [f"/{TRANSFERS}/{name}" for name in ("Upload", "Download", "Publish", "Watch")]
for module in (coordinator_pb2, parameters_pb2):
    for service in module.DESCRIPTOR.services_by_name.values():
        PATHS += [f"/{service.full_name}/{method.name}" for method in service.methods]
METADATA = {"none": (), "wrong": (("authorization", "Bearer " + "0" * 64),)}
results = []
for target in json.loads(sys.argv[1]):
    with grpc.insecure_channel(target) as channel:
        for path in PATHS:
            for name, metadata in METADATA.items():
                call = channel.stream_stream(path, None, None)
                try:
                    list(call(iter([b""]), metadata=metadata, timeout=20))
                    results.append([target, path, name, "OK"])
                except grpc.RpcError as error:
                    results.append([target, path, name, error.code().name])
for url in json.loads(sys.argv[2]):
    for authorization in ("", "Bearer " + "0" * 64):
        try:
            urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": authorization}), timeout=20)
            results.append([url, "", authorization, "OK"])
        except urllib.error.HTTPError as error:
            results.append([url, "", authorization, str(error.code)])
print(json.dumps(results))
"""
GRPC_PORTS = {"coordinator": 7000, "trainer": 7001, "buffer": 7001, "policy": 7001}


def test_every_call_without_the_token_is_refused(where: Namespace, cartpole: Object, actor_image: str) -> None:
    cartpole["spec"]["stop"] = {"wallSeconds": 600}
    where.apply(cartpole)
    experiment = ClusterExperiment(where, cartpole["metadata"]["name"])
    experiment.await_phase("Running")
    until(lambda: experiment.condition("Ready").get("status") == "True", "every pod serves its port")
    places = [(pod["metadata"]["labels"]["rlsrl.dev/role"], pod["status"]["podIP"]) for pod in experiment.pods()]
    targets = [f"{address}:{GRPC_PORTS[role]}" for role, address in places if role in GRPC_PORTS]
    paths = ("status", "curve", "versions", "logs", "log?name=trainer-0")
    pages = [f"http://{address}:8080/{path}" for role, address in places if role == "coordinator" for path in paths]
    where.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "intruder"},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 10001,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [
                    {
                        "name": "intruder",
                        "image": actor_image,
                        "command": ["python", "-c", INTRUDER, json.dumps(targets), json.dumps(pages)],
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                        },
                    }
                ],
            },
        }
    )

    def ended() -> bool:
        pod = where.get("pod", "intruder")
        return pod is not None and pod["status"].get("phase") in ("Succeeded", "Failed")

    until(ended, "the intruder has tried everything")
    output = where.kubectl("logs", "intruder")
    results = json.loads(output.splitlines()[-1])
    calls = [each for each in results if each[1]]
    assert {each[0] for each in calls} == set(targets)
    assert {each[3] for each in calls} == {"UNAUTHENTICATED"}, [each for each in calls if each[3] != "UNAUTHENTICATED"]
    assert [each[3] for each in results if not each[1]] == ["401"] * 2 * len(paths)
    steps = experiment.env_steps()
    until(lambda: experiment.env_steps() > steps, "training went on")
