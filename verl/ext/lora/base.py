"""Which weights a LoRA adapter was trained on: a fingerprint beside it, and the check of a base.

peft's own files only name the base, and shapes fit any model of the same architecture.
"""

import json
import logging
from pathlib import Path

from verl.errors import ModelError, explain
from verl.json_files import read_object
from verl.model_files import are_other_weights, model_errors, weights_fingerprint

logger = logging.getLogger(__name__)

BASE_FILE = "adapter_base.json"
"""File of an adapter's folder with the fingerprint of its base's weights."""


def write_base(adapter: Path, base: str) -> None:
    """Write which weights an adapter was trained on, if `base` has local files."""
    found = weights_fingerprint(base)
    if found == base:
        (adapter / BASE_FILE).unlink(missing_ok=True)
    else:
        (adapter / BASE_FILE).write_text(json.dumps({"fingerprint": found}) + "\n")


def check_base(subject: str, adapter: Path, base: Path, named: str) -> None:
    """Raise ModelError, which begins with `subject`, if an adapter was trained on other weights.

    The same weights may also be in other files, by number or dtype; then this only warns. So it
    does for an adapter that peft wrote: the model that its config names, `named`, if that is a
    folder, may have been replaced since.
    """
    is_recorded = (adapter / BASE_FILE).is_file()
    if is_recorded:
        with model_errors(str(adapter), BASE_FILE, subject, "the fingerprint of its base"):
            saved = str(read_object(adapter / BASE_FILE)["fingerprint"])
    elif named and Path(named).expanduser().is_dir():
        saved = weights_fingerprint(named)
    else:
        return
    actual = weights_fingerprint(str(base), saved)
    is_other = are_other_weights(actual, saved)
    if is_recorded and is_other:
        got, expected = f"an adapter of other weights than those of {base}", "an adapter of these"
        fix = f"give --model the model that it was trained on: {named or 'not recorded'}"
        raise ModelError(explain(subject, f"{got} ({saved}, {actual})", expected, fix))
    if is_other:
        logger.warning("%s: %s, which its config names, has other weights than %s; an adapter of "
                       "another model gives wrong answers", subject, named, base)  # fmt: skip
    elif is_recorded and actual != saved:
        logger.warning("%s: %s is not in the files that it was trained on (%s, now %s): unless it "
                       "is the same model in another dtype or number of files, the answers are "
                       "wrong", subject, base, saved, actual)  # fmt: skip
