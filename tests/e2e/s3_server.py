"""A real S3 server as a pod, with a bucket and its keys; and a proxy as a pod, which delays some of its requests."""

from __future__ import annotations

from pathlib import Path

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import Namespace

PORT = 7070
SLOW_STORE = "/tmp/slow"
"""While the proxy's container has this file, the proxy holds uploads of states back."""
_USER = 10001
_KEYS = {"AWS_ACCESS_KEY_ID": "e2e-access-key", "AWS_SECRET_ACCESS_KEY": "e2e-secret-key"}
_KEYS_SECRET = "bucket-keys"
_CONTAINER = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_MOUNTS = [{"name": "data", "mountPath": "/data"}]
_PROXY = f"""
import asyncio, os, sys

async def pass_on(reader, writer):
    while data := await reader.read(1 << 16):
        if data.startswith(b"PUT ") and b"/states/" in data.partition(b" HTTP/")[0]:
            for _ in range(10 * int(sys.argv[2])):
                if not os.path.exists("{SLOW_STORE}"):
                    break
                await asyncio.sleep(0.1)
        writer.write(data)
        await writer.drain()
    writer.close()

async def connected(reader, writer):
    server_reader, server_writer = await asyncio.open_connection(sys.argv[1], {PORT})
    await asyncio.gather(pass_on(reader, server_writer), pass_on(server_reader, writer), return_exceptions=True)

async def main():
    async with await asyncio.start_server(connected, "0.0.0.0", {PORT}) as server:
        await server.serve_forever()

asyncio.run(main())
"""


def start_s3(where: Namespace, actor_image: str) -> Object:
    """Start the server behind the Service ``s3``; return the ``objectStore`` of an experiment that uses its bucket."""
    server = {
        "image": "localhost/s3:e2e",
        "args": ["--port", f":{PORT}", "--region", "us-east-1", "--quiet", "posix", "/data"],
        "env": [
            {"name": "ROOT_ACCESS_KEY", "value": _KEYS["AWS_ACCESS_KEY_ID"]},
            {"name": "ROOT_SECRET_KEY", "value": _KEYS["AWS_SECRET_ACCESS_KEY"]},
        ],
    }
    bucket = {"name": "bucket", "image": actor_image, "command": ["mkdir", "-p", "/data/versions"]}
    bucket |= {"volumeMounts": _MOUNTS, "securityContext": _CONTAINER}
    _start(where, "s3", server, initContainers=[bucket])
    where.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": _KEYS_SECRET}, "stringData": _KEYS})
    return _object_store(where, "s3")


def start_slow_proxy(where: Namespace, actor_image: str, *, seconds: int) -> Object:
    """Start a proxy that delays states for ``seconds`` (see ``SLOW_STORE``); return its ``objectStore``."""
    command = ["python", "-c", _PROXY, f"s3.{where.name}.svc", str(seconds)]
    _start(where, "s3-proxy", {"image": actor_image, "command": command})
    return _object_store(where, "s3-proxy")


def _object_store(where: Namespace, service: str) -> Object:
    return {
        "url": "s3://versions",
        "endpoint": f"http://{service}.{where.name}.svc:{PORT}",
        "credentialsSecret": _KEYS_SECRET,
    }


def _start(where: Namespace, name: str, container: Object, **pod: object) -> None:
    labels = {"app": name}
    mounts = [*_MOUNTS, {"name": "tmp", "mountPath": str(Path(SLOW_STORE).parent)}]
    container |= {
        "name": name,
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": mounts,
        "securityContext": _CONTAINER,
    }
    where.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": _USER,
                    "fsGroup": _USER,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [container],
                "volumes": [{"name": "data", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
                **pod,
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": labels, "ports": [{"port": PORT}]},
        },
    )
    where.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=60s")
