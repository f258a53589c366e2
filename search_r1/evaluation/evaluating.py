"""Runs an evaluation from its options to its report.

The data, the retriever and the model's name are checked before anything slow is imported.
"""

import contextlib
import shutil
from pathlib import Path

from search_r1 import loops
from search_r1.evaluation.methods import METHODS
from search_r1.evaluation.options import EvaluationOptions
from search_r1.evaluation.report import write_report
from search_r1.evaluation.summary import Summary
from search_r1.inference.model_name import at_latest_checkpoint, check_names
from search_r1.inference.retriever_facts import NO_RETRIEVER, retriever_facts
from verl.data.prompts import choose
from verl.data.rows import load_rows
from verl.files import LOCK_NAME, exclusive_lock
from verl.remote_code import set_trust


def run_evaluation(options: EvaluationOptions) -> Summary:
    """Run all missing dialogues, write the report and return its summary. Raises UserError."""
    set_trust(options.trust_remote_code)
    out = Path(options.out)
    is_new = not out.exists()
    with exclusive_lock(out, "--out"):
        try:
            rows = load_rows(options.data, options.prompt_key)
            rows = choose(rows, options.num_rows)
            facts = NO_RETRIEVER
            if METHODS[options.method].needs_documents:
                facts = loops.run(retriever_facts(options.retriever_url))
            options = at_latest_checkpoint(options)
            check_names(options)
            from search_r1.phases import phase  # noqa: PLC0415 - rich, for which --help waits

            with phase("importing torch and transformers"):
                from search_r1.evaluation.dialogues import run_missing  # noqa: PLC0415
                from search_r1.inference.model import open_model_folder  # noqa: PLC0415

            with contextlib.ExitStack() as stack:
                with phase(f"reading the model {options.model}"):
                    folder = stack.enter_context(open_model_folder(options))
                loops.run(run_missing(options, folder, rows, facts))
            return write_report(out, options.pass_k, options.num_resamples, options.seed)
        finally:
            if is_new and [file.name for file in out.iterdir()] == [LOCK_NAME]:
                shutil.rmtree(out)  # refused before anything was written
