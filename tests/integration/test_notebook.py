"""``examples/first-run.ipynb`` runs in a Jupyter kernel, as it stands."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nbformat
from nbclient import NotebookClient

import rlsrl

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first-run.ipynb"


def test_the_notebook_trains_draws_and_plays(tmp_path: Path) -> None:
    shutil.copy(NOTEBOOK, tmp_path)
    notebook = nbformat.read(tmp_path / NOTEBOOK.name, as_version=4)  # type: ignore[no-untyped-call]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells), "outputs are not kept in the repository"

    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()

    training, summary, plot, acting = ["".join(map(shown, cell.outputs)) for cell in cells]
    assert "env steps" in training, "the progress is shown below the cell"
    assert "mean return" in summary
    assert "of them not trained" in summary
    assert "image/png" in plot
    assert re.fullmatch(r"version 1\.\d+: return \d+\n", acting)
    run = rlsrl.Run(tmp_path / "runs" / "notebook")
    assert run.summary is not None
    assert run.summary["finished"]
    assert run.metrics("own")["own/share_of_the_goal"].size


def shown(output: nbformat.NotebookNode) -> str:
    """Return the text of a cell's output, or the kind of its picture."""
    return output.text if output.output_type == "stream" else ", ".join(output.data)
