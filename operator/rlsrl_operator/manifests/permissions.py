"""What the administrator does not allow of an experiment. Pure."""

from __future__ import annotations

from rlsrl.api.spec import RLExperiment
from rlsrl_operator.manifests.egress import egress_faults
from rlsrl_operator.manifests.templates import template_faults
from rlsrl_operator.settings import OperatorSettings


def disallowed(experiment: RLExperiment, settings: OperatorSettings) -> list[str]:
    """Return the faults of the experiment's pod templates and destinations under the administrator's rules."""
    templates = [] if settings.pod_templates == "any" else template_faults(experiment)
    return [*templates, *egress_faults(experiment, settings.environments)]
