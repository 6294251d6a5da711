"""Write the dashboards to the folder in the first argument."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from experiment_dashboard import experiment_dashboard
from operator_dashboard import operator_dashboard

folder = Path(sys.argv[1])
for name, made in (("experiment", experiment_dashboard()), ("operator", operator_dashboard())):
    (folder / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
