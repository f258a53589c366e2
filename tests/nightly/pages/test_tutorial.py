"""example/tutorial.ipynb: without outputs in git, and run from top to bottom in a kernel."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOK = ROOT / "example" / "tutorial.ipynb"


def test_the_notebook_is_kept_without_outputs() -> None:
    """So that running it changes nothing in git."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code_cells = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code_cells and all(not cell["outputs"] for cell in code_cells)
    assert all(cell["execution_count"] is None for cell in code_cells)


@pytest.mark.slow
@pytest.mark.vllm_cpu
@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="pip install '.[docs]'")
def test_the_notebook_runs_within_five_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps of GRPO teach the tiny policy to search; the curve is drawn."""
    import nbclient  # noqa: PLC0415 - in the extra `docs`
    import nbformat  # noqa: PLC0415

    shutil.copytree(ROOT / "example", tmp_path / "example")
    for name in ("verl", "search_r1"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    nbformat.write(notebook, tmp_path / "run.ipynb")
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert any("image/png" in out.get("data", {}) for out in outputs)
    scores = [out["text"] for out in outputs if "exact match 0" in out.get("text", "")]
    before, after = map(float, scores[-1].split()[2::2])
    assert after > before + 0.2, scores[-1]
