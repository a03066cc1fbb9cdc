"""The notebooks of the documentation run from their first cell to their last."""

from __future__ import annotations

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook, resources = nbformat.read(path, as_version=4), {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    assert list(tmp_path.glob("**/metrics.csv"))
