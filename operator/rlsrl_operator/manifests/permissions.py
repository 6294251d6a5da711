"""What the administrator does not allow of an experiment. Pure."""

from __future__ import annotations

from rlsrl.api.spec import RLExperiment
from rlsrl_operator.manifests.egress import egress_faults
from rlsrl_operator.manifests.templates import template_faults
from rlsrl_operator.settings import OperatorSettings


def disallowed(experiment: RLExperiment, settings: OperatorSettings) -> list[str]:
    """Return the faults of the experiment's pod templates and destinations under the administrator's rules, and those
    of fields that name something on one machine."""
    templates = [] if settings.pod_templates == "any" else template_faults(experiment)
    return [*templates, *egress_faults(experiment, settings.environments), *_local_faults(experiment)]


def _local_faults(experiment: RLExperiment) -> list[str]:
    if (initial := experiment.spec.parameters.from_) is None:
        return []
    allowed = (
        "allowed on a cluster: experiment, another one of the namespace; or file, an absolute path in the trainers' "
        "pods, for example on a volume of trainers.podTemplate"
    )
    if initial.run is not None:
        return [f"spec.parameters.from.run: {initial.run!r} is a run on one machine; {allowed}"]
    if initial.experiment == experiment.metadata.name:
        return [f"spec.parameters.from.experiment: {initial.experiment!r} is this experiment itself; {allowed}"]
    if initial.file is not None and not initial.file.startswith("/"):
        return [f"spec.parameters.from.file: {initial.file!r} is relative to no folder of a pod; {allowed}"]
    return []
