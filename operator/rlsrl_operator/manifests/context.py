"""Whom manifests are about, and what everything made for an experiment is called."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rlsrl.api.live import name_of
from rlsrl.api.placement import ClusterPlacement
from rlsrl.api.pods import EXPERIMENT_LABEL, ROLE_LABEL, UID_LABEL
from rlsrl.api.resolve import resolve
from rlsrl.api.resolved import ResolvedExperiment, RoleConfig
from rlsrl.api.spec import API_VERSION, KIND, RLExperiment
from rlsrl_operator.manifests.kueue import QUEUE_LABEL, queue_labels
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.roles import COORDINATOR
from rlsrl_operator.settings import OperatorSettings

MANAGER = "rlsrl-operator"
ATTEMPT_ANNOTATION = "rlsrl.dev/attempt"
"""On trainer pods: the gang's life that they belong to."""
TEMPLATE_ANNOTATION = "rlsrl.dev/template"
"""On pods: a digest of the template that they were made from."""
SETTINGS_ANNOTATION = "rlsrl.dev/settings"
"""On the coordinator's pod: a digest of the live settings. A pod that is changed gets its volumes looked at at once."""
DATA_FOLDER = "/data"
SETTINGS_FOLDER = "/etc/rlsrl/settings"
SETTINGS_KEY = "settings.json"
STATE_FOLDER = "/var/lib/rlsrl"
"""In a pod: what outlives its containers."""


@dataclass(frozen=True, kw_only=True)
class ExperimentContext:
    """One generation of one experiment."""

    experiment: RLExperiment
    namespace: str
    uid: str
    generation: int
    settings: OperatorSettings

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.experiment.metadata.name

    @property
    def queue(self) -> str | None:
        """The queue in which its trainers wait; None if they do not."""
        return self.experiment.metadata.labels.get(QUEUE_LABEL)

    @property
    def queue_labels(self) -> dict[str, str]:
        """The labels by which they do."""
        return queue_labels(self.experiment.metadata.labels)

    @cached_property
    def configs(self) -> ResolvedExperiment:
        """What each role is told."""
        placement = ClusterPlacement(
            run_uid=self.uid,
            coordinator_host=self.name_of(COORDINATOR),
            record_folder=f"{DATA_FOLDER}/{self.uid}",
            ledger_folder=f"{STATE_FOLDER}/ledger",
            settings_path=f"{SETTINGS_FOLDER}/{SETTINGS_KEY}",
        )
        return resolve(self.experiment, placement)

    def name_of(self, part: str) -> str:
        """The name of an object made for the experiment."""
        return f"{self.name}-{part}"

    @property
    def revision_name(self) -> str:
        """The name of this generation's revision."""
        return self.name_of(f"record-{self.uid[:8]}-{self.generation}")

    def config_name(self, role: str, config: RoleConfig) -> str:
        """The name of the ConfigMap that holds what a role is told, the same for what differs in live settings alone.
        Nodes keep what is immutable by its name, so no two share one."""
        return self.name_of(f"{role}-{self.uid[:8]}-{name_of(config)}")

    @property
    def settings_name(self) -> str:
        """The name of the ConfigMap that holds the live settings."""
        return self.name_of("settings")

    @property
    def token_name(self) -> str:
        """The name of the token's Secret; see ``config_name``."""
        return self.name_of(f"token-{self.uid[:8]}")

    @property
    def own_labels(self) -> dict[str, str]:
        """The labels that everything of the experiment has, and nothing else."""
        return {EXPERIMENT_LABEL: self.name, UID_LABEL: self.uid}

    def selector(self, role: str) -> dict[str, str]:
        """The labels that a role's pods are found by."""
        return {**self.own_labels, ROLE_LABEL: role}

    def labels(self, role: str | None = None) -> dict[str, str]:
        """The labels of an object."""
        return {
            "app.kubernetes.io/name": "rlsrl",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/managed-by": MANAGER,
            **({} if role is None else {"app.kubernetes.io/component": role}),
            **(self.selector(role) if role else self.own_labels),
        }

    def metadata(self, name: str, role: str | None = None, *, owned: bool = True) -> Manifest:
        """The metadata of an object that goes with the experiment, unless ``owned`` is False."""
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": self.name, "uid": self.uid, "controller": True}
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels(role),
            **({"ownerReferences": [owner]} if owned else {}),
        }
