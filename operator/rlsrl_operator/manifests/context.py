"""One generation of an experiment, and the names and labels of its objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rlsrl.api.live import name_of
from rlsrl.api.placement import cluster_placement
from rlsrl.api.pods import EXPERIMENT_LABEL, ROLE_LABEL, UID_LABEL
from rlsrl.api.resolve import ResolvedExperiment, resolve
from rlsrl.api.retry import run_uid_of
from rlsrl.api.role_names import COORDINATOR
from rlsrl.api.spec import API_VERSION, KIND, RLExperiment
from rlsrl_operator.manifests.kueue import QUEUE_LABEL, queue_labels
from rlsrl_operator.manifests.servers import EnvironmentService, ServerRule, ServiceName, server_rule, service_of
from rlsrl_operator.manifests.source import SourceExperiment, SourceName, source_fault, source_of
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.settings import OperatorSettings

MANAGER = "rlsrl-operator"
ATTEMPT_ANNOTATION = "rlsrl.dev/attempt"
"""Annotation of trainer pods: the number of their attempt."""
TEMPLATE_ANNOTATION = "rlsrl.dev/template"
"""Annotation of pods: a digest of their template."""
SETTINGS_ANNOTATION = "rlsrl.dev/settings"
"""Annotation of the coordinator's pod: a digest of the live settings. Its change makes the node refresh the volumes."""
DATA_FOLDER = "/data"
SETTINGS_FOLDER = "/etc/rlsrl/settings"
SETTINGS_KEY = "settings.json"
STATE_FOLDER = "/var/lib/rlsrl"
"""The folder in a pod that outlives its containers, and the pod where it is a volume."""


@dataclass(frozen=True, kw_only=True)
class ExperimentContext:
    """One generation of one experiment."""

    experiment: RLExperiment
    namespace: str
    uid: str
    generation: int
    settings: OperatorSettings
    first_attempt: int = 1
    """The first attempt since the failed experiment was last tried again."""
    fresh_attempt: int | None = None
    """The attempt that last began again from step 0; None if none did."""
    services: Mapping[ServiceName, EnvironmentService] = field(default_factory=dict)
    """The Services of ``service``, as they were read last."""
    sources: Mapping[SourceName, SourceExperiment] = field(default_factory=dict)
    """The experiment of ``source``, as it was read last."""

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.experiment.metadata.name

    @property
    def queue(self) -> str | None:
        """The trainers' queue, or None."""
        return self.experiment.metadata.labels.get(QUEUE_LABEL)

    @property
    def queue_labels(self) -> dict[str, str]:
        """The labels that put the trainers into the queue."""
        return queue_labels(self.experiment.metadata.labels)

    @cached_property
    def configs(self) -> ResolvedExperiment:
        """The config of each role."""
        placement = cluster_placement(
            run_uid=self.run_uid,
            coordinator_host=self.name_of(COORDINATOR),
            record_folder=f"{DATA_FOLDER}/{self.run_uid}",
            state_folder=f"{STATE_FOLDER}/runs",
            settings_path=f"{SETTINGS_FOLDER}/{SETTINGS_KEY}",
            first_attempt=self.first_attempt,
        )
        return resolve(self.experiment, placement)

    @property
    def run_uid(self) -> str:
        """The identity of the experiment's present run."""
        return run_uid_of(self.uid, self.fresh_attempt)

    def name_of(self, part: str) -> str:
        """Return the name of an object of the experiment."""
        return f"{self.name}-{part}"

    @property
    def revision_name(self) -> str:
        """The name of the revision of this generation, since the failed experiment was last tried again."""
        since = "" if self.first_attempt == 1 else f"-{self.first_attempt}"
        return self.name_of(f"record-{self.uid[:8]}-{self.generation}{since}")

    def revision_order(self, name: str) -> tuple[int, int] | None:
        """Return generation and first attempt of the revision of that name, by which revisions of one experiment are
        ordered; None if no revision of this experiment has the name.
        """
        found = re.fullmatch(rf"{re.escape(self.name_of(f'record-{self.uid[:8]}'))}-(\d+)(?:-(\d+))?", name)
        return None if found is None else (int(found[1]), int(found[2] or 1))

    def config_name(self, role: str) -> str:
        """Return the name of a role's ConfigMap. Configs that differ in live settings alone have the same name.

        Nodes cache immutable objects by name, so two contents never share a name.
        """
        return self.name_of(f"{role}-{self.uid[:8]}-{name_of(self.configs.configs[role])}")

    @property
    def settings_name(self) -> str:
        """The name of the ConfigMap that holds the live settings."""
        return self.name_of("settings")

    @property
    def token_name(self) -> str:
        """The name of the token's Secret; see ``config_name``."""
        return self.name_of(f"token-{self.uid[:8]}")

    @property
    def service(self) -> ServiceName | None:
        """The Service of the environments' server, if a network rule follows from it."""
        return service_of(self.experiment, self.namespace, self.settings.environments)

    @property
    def server(self) -> ServerRule:
        """The network rule for the environments' server, by what the administrator allows today."""
        return server_rule(self.experiment, self.namespace, self.settings.environments, self.services)

    @property
    def source(self) -> SourceName | None:
        """The experiment from whose weights this one starts, or None."""
        return source_of(self.experiment, self.namespace)

    @property
    def source_fault(self) -> str:
        """Why the experiment cannot start from its source: field, value, what is allowed. Empty: it can."""
        return "" if self.source is None else source_fault(self.experiment, self.source, self.sources[self.source])

    @property
    def source_secret_name(self) -> str:
        """The name of the Secret with the way to the source."""
        return self.name_of(f"source-{self.uid[:8]}")

    @property
    def own_labels(self) -> dict[str, str]:
        """The labels of all objects of this experiment, and of no other objects."""
        return {EXPERIMENT_LABEL: self.name, UID_LABEL: self.uid}

    def selector(self, role: str) -> dict[str, str]:
        """Return the labels that select a role's pods."""
        return {**self.own_labels, ROLE_LABEL: role}

    def labels(self, role: str | None = None) -> dict[str, str]:
        """Return the labels of an object."""
        return {
            "app.kubernetes.io/name": "rlsrl",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/managed-by": MANAGER,
            **({} if role is None else {"app.kubernetes.io/component": role}),
            **(self.selector(role) if role else self.own_labels),
        }

    def metadata(self, name: str, role: str | None = None, *, owned: bool = True) -> Manifest:
        """Return the metadata of an object, which is deleted with the experiment unless ``owned`` is False."""
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": self.name, "uid": self.uid, "controller": True}
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels(role),
            **({"ownerReferences": [owner]} if owned else {}),
        }
