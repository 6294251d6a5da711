"""A fake kubectl for tests without a cluster: a program that returns objects from a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Object = Mapping[str, Any]

_PROGRAM = """#!{python}
import json, pathlib, socket, sys, threading, time
HERE = pathlib.Path(__file__).parent
words = sys.argv[1:]
with (HERE / "calls").open("a") as calls:
    calls.write(" ".join(words) + "\\n")
def option(*names):
    for name in names:
        if name in words:
            at = words.index(name)
            value = words[at + 1]
            del words[at : at + 2]
            return value
def fail(said):
    sys.exit(said.rstrip())
option("--namespace")
if (HERE / "refusal").exists():
    fail((HERE / "refusal").read_text())
objects = json.loads((HERE / "objects.json").read_text())
def of_kind(kinds):
    return {{kind.split(".")[0].rstrip("s") for kind in kinds.split(",")}}
def of(kinds):
    return [each for each in objects if each["kind"].lower() in of_kind(kinds)]
def has(each, labels):
    own = each["metadata"].get("labels", {{}})
    wanted = [label.partition("=") for label in labels.split(",")]
    return all(own.get(name) == value if equals else name in own for name, equals, value in wanted)
def require_permission(verb):
    forbidden = HERE / ("forbidden-" + verb)
    if forbidden.exists() and of_kind(words[1]) & of_kind(forbidden.read_text()):
        fail("Error from server (Forbidden): " + words[1] + " is forbidden: User viewer cannot " + verb + " it")
def get():
    require_permission("list")
    selector, field, output = option("--selector"), option("--field-selector"), option("--output")
    found = of(words[1])
    if selector:
        found = [each for each in found if has(each, selector)]
    if field:
        name, value = field.split("=")
        found = [each for each in found if each.get(name) == value]
    names = [word for word in words[2:] if not word.startswith("--")]
    if names:
        found = [each for each in found if each["metadata"]["name"] in names]
        print(json.dumps(found[0]) if found else "", end="")
    elif output == "name":
        print("\\n".join(each["kind"].lower() + "/" + each["metadata"]["name"] for each in found))
    else:
        print(json.dumps({{"items": found}}))
def merged(value, change):
    if not isinstance(change, dict):
        return change
    before = value if isinstance(value, dict) else {{}}
    after = {{**before, **{{name: merged(before.get(name), each) for name, each in change.items()}}}}
    return {{name: each for name, each in after.items() if each is not None}}
def write(found, change):
    version = found["metadata"]["resourceVersion"]
    if change.get("metadata", {{}}).get("resourceVersion", version) != version:
        fail(
            'Error from server (Conflict): Operation cannot be fulfilled on ' + words[1] + ' "' + words[2] + '": '
            "the object has been modified; please apply your changes to the latest version and try again"
        )
    found.update(merged(found, change))
    found["metadata"]["resourceVersion"] = str(int(version) + 1)
    (HERE / "objects.json").write_text(json.dumps(objects))
def patch():
    require_permission("patch")
    assert option("--type") == "merge"
    change = json.loads(option("--patch"))
    (found,) = [each for each in of(words[1]) if each["metadata"]["name"] == words[2]]
    others = HERE / "changes-of-others.json"
    first, *further = json.loads(others.read_text()) if others.exists() else [None]
    if first is not None:
        others.write_text(json.dumps(further or [None]))
        write(found, first)
    write(found, change)
def annotate():
    kind, name, *changes = [word for word in words[1:] if word != "--overwrite"]
    (found,) = [each for each in of(kind) if each["metadata"]["name"] == name]
    annotations = found["metadata"].setdefault("annotations", {{}})
    for change in changes:
        key, _, value = change.partition("=")
        annotations.pop(key.rstrip("-"), None)
        if value:
            annotations[key] = value
    (HERE / "objects.json").write_text(json.dumps(objects))
def logs():
    option("--container"), option("--tail")
    name = words[1]
    path = HERE / (name + (".previous" if "--previous" in words else "") + ".log")
    if not path.exists():
        fail("Error from server (BadRequest): container \\"worker\\" in pod \\"" + name + "\\" is waiting to start")
    for line in path.read_text().splitlines():
        print("[pod/" + name + "/worker] " + line, flush=True)
    if "--follow" in words and not (HERE / (name + ".ended")).exists():
        time.sleep(3600)
def pump(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
def port_forward():
    if not (HERE / "coordinator").exists():
        fail("error: unable to forward port because pod is not running. Current status=Pending")
    host, port = (HERE / "coordinator").read_text().rsplit(":", 1)
    server = socket.create_server(("127.0.0.1", 0))
    print("Forwarding from 127.0.0.1:" + str(server.getsockname()[1]) + " -> 7000", flush=True)
    while True:
        near, _ = server.accept()
        far = socket.create_connection((host, int(port)))
        for ends in ((near, far), (far, near)):
            threading.Thread(target=pump, args=ends, daemon=True).start()
{{"annotate": annotate, "get": get, "logs": logs, "patch": patch, "port-forward": port_forward}}[words[0]]()
"""


class KubectlStandIn:
    """A folder for the PATH, with the fake program and the objects of its cluster."""

    def __init__(self, folder: Path) -> None:
        """Create the program with an empty cluster."""
        self.folder = folder
        program = folder / "kubectl"
        program.write_text(_PROGRAM.format(python=sys.executable))
        program.chmod(0o755)
        self.show()

    @property
    def calls(self) -> list[str]:
        """The arguments of each call so far."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def annotations(self, kind: str, name: str) -> Mapping[str, str]:
        """Return the annotations of an object."""
        annotations: Mapping[str, str] = self._object(kind, name)["metadata"].get("annotations", {})
        return annotations

    def spec(self, kind: str, name: str) -> Object:
        """Return the spec of an object."""
        spec: Object = self._object(kind, name)["spec"]
        return spec

    def show(self, *objects: Object) -> None:
        """Replace the cluster's objects."""
        versioned = [{**each, "metadata": {"resourceVersion": "1", **each["metadata"]}} for each in objects]
        (self.folder / "objects.json").write_text(json.dumps(versioned))

    def change_before_patches(self, *changes: Object) -> None:
        """Apply a merge patch of another client before each of the next patches, to the same object."""
        (self.folder / "changes-of-others.json").write_text(json.dumps(changes))

    def refuse(self, said: str) -> None:
        """Make every further call fail with this message."""
        (self.folder / "refusal").write_text(said)

    def forbid(self, kinds: str, *, verb: Literal["list", "patch"] = "list") -> None:
        """Refuse every further request for one of these kinds, such as ``secrets,pods``, for lack of permission."""
        (self.folder / f"forbidden-{verb}").write_text(kinds)

    def log(self, pod: str, text: str, *, previous: bool = False, ended: bool = False) -> None:
        """Set the log of a pod's current or previous worker. ``--follow`` waits for ever unless it has ended."""
        if ended:
            (self.folder / f"{pod}.ended").touch()
        (self.folder / f"{pod}{'.previous' if previous else ''}.log").write_text(text)

    def reach(self, coordinator: str) -> None:
        """Make port-forwards lead to that address."""
        (self.folder / "coordinator").write_text(coordinator)

    def _object(self, kind: str, name: str) -> Object:
        objects: list[Object] = json.loads((self.folder / "objects.json").read_text())
        (found,) = (each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
        return found
