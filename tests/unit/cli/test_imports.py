"""What commands import: torch takes a second and 480 MB, which a command that does not learn can do without."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["rlsrl.cli", "rlsrl.cli.run", "rlsrl.local.session", "rlsrl.sizing.forecast"])
def test_torch_is_not_imported(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
