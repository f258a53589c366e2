"""Writes the folder of a shared model, and uploads it: weights or adapter, settings, card."""

import json
import logging
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from search_r1.evaluation.store import read_evaluation
from search_r1.inference.adapter_folder import CONFIG_FILE, base_model_of
from search_r1.sharing.card import base_of, write_card
from search_r1.sharing.facts import RunFacts, read_facts, read_metrics, run_folder
from search_r1.sharing.push import PushOptions
from verl.agent.settings import SETTINGS_FILE, copy_settings
from verl.errors import ConfigError, SaveError, UserError, explain, first_line, redact
from verl.hub_access import hub_address, hub_problem
from verl.json_files import read_object

logger = logging.getLogger(__name__)


def push(options: PushOptions) -> int:
    """Write the folder, or upload it. Raises UserError before any weights are read."""
    if (options.to is None) == (options.out is None):
        got = "both" if options.to else "neither --to nor --out"
        fix = "--to OWNER/NAME for the hub, --out DIR for a folder"
        raise ConfigError(explain("search-r1 push", got, "one of them", fix))
    folder, step_dir = run_folder(options.run)
    facts = read_facts(folder, step_dir)
    _check_adapter(options, facts, folder, step_dir)
    if options.out is not None:
        write_folder(options, folder, step_dir, facts, options.out)
        print(options.out)  # noqa: T201
        return 0
    name = str(options.to)
    api = _repository(name, options.private)
    with tempfile.TemporaryDirectory(prefix="pushed-") as temporary:
        out = Path(temporary) / "model"
        write_folder(options, folder, step_dir, facts, out)
        try:
            api.upload_folder(
                repo_id=name, folder_path=out, commit_message=f"Model after step {facts.step}"
            )
        except Exception as error:  # their types depend on the library's release
            raise _refused(name, error) from error
    print(f"{redact(hub_address())}/{name}")  # noqa: T201
    return 0


def _check_adapter(
    options: PushOptions, facts: RunFacts, folder: Path, step_dir: Path | None
) -> None:
    """Check what an adapter needs: that the run has one, and a base that others can load."""
    if not options.adapter:
        return
    if not (step_dir or (folder / "adapter" / CONFIG_FILE).is_file()):
        expected = "a run with lora_rank above 0"
        fix = "leave --adapter out: all weights were trained"
        raise ConfigError(explain("--adapter", f"{folder} without adapter/", expected, fix))
    if options.to and not (options.base_model or base_of(options, facts)):
        fix = "name the model that was trained as others find it: --base-model OWNER/NAME"
        raise ConfigError(explain("--base-model", "nothing", "a base on the hub", fix))


def _repository(name: str, private: bool) -> HfApi:
    """Return the hub's API, with the repository created. Raises ConfigError or SaveError."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        fix = "--to OWNER/NAME, or --out DIR for a folder"
        raise ConfigError(explain("--to", name, "a name of the hub", fix)) from error
    if problem := hub_problem():
        fix = "check the network, or write a folder: --out DIR"
        raise SaveError(explain(f"--to {name}", problem, "the hub", fix))
    if not get_token():
        fix = "hf auth login, or set HF_TOKEN to a token that may write"
        raise ConfigError(explain(f"--to {name}", "no token", "a login of the hub", fix))
    api = HfApi(hub_address())
    try:
        api.create_repo(name, private=private, exist_ok=True)
    except Exception as error:  # their types depend on the library's release
        raise _refused(name, error) from error
    return api


def _refused(name: str, error: Exception) -> SaveError:
    got = redact(f"{type(error).__name__}: {first_line(error)}")[:300]
    fix = "check name and token, or write a folder: --out DIR"
    return SaveError(explain(f"--to {name}", got, "the hub to take the model", fix))


def write_folder(
    options: PushOptions, folder: Path, step_dir: Path | None, facts: RunFacts, out: Path
) -> None:
    """Write weights or adapter, settings and card to a new folder. Raises UserError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fix = "name another folder, or delete it"
        raise ConfigError(explain("--out", f"{out}, which has content", "a new folder", fix))
    out.parent.mkdir(parents=True, exist_ok=True)
    if step_dir is None:
        source = folder / ("adapter" if options.adapter else "model")
        shutil.copytree(source, out, dirs_exist_ok=True)
    else:
        from verl.checkpoint.exporting import export  # noqa: PLC0415 - torch, for a checkpoint

        export(step_dir, out, None, options.dtype, options.adapter)
    settings = _settings(out, folder)
    if options.adapter:
        _name_base(out, options.base_model or base_of(options, facts))
    try:
        evaluations = [_evaluation(path, out, folder) for path in options.evaluations]
    except UserError:
        shutil.rmtree(out)  # it was made above
        raise
    write_card(options, replace(facts, evaluations=evaluations), settings, out)


def _settings(out: Path, run: Path) -> Mapping[str, Any]:
    """Return the settings of the run's dialogues, which are written if `out` lacks them."""
    if not (out / SETTINGS_FILE).is_file() and not copy_settings(run / "model", out):
        return {}
    settings = read_object(out / SETTINGS_FILE)
    named = {"agent": settings.get("agent", "dialogue"), "tools": settings.get("tools", [])}
    settings |= {"agent": shared_name(named["agent"]), "tools": [*map(shared_name, named["tools"])]}
    if own := [name for name in (settings["agent"], *settings["tools"]) if ":" in name]:
        logger.warning("not in the folder, so publish them beside it: %s", ", ".join(own))
    (out / SETTINGS_FILE).write_text(json.dumps(settings) + "\n", encoding="utf-8")
    return settings


def shared_name(name: str) -> str:
    """Return the name of an agent or tool without its file's folders or its server's address."""
    if "://" in name:
        return f"{name.partition(':')[0]}:URL"
    return re.sub(r"[^:]*[/\\]", "", name)


def _name_base(adapter: Path, name: str | None) -> None:
    """Write into an adapter's config which model others load it onto."""
    if name:
        file = adapter / CONFIG_FILE
        content = json.loads(file.read_text(encoding="utf-8"))
        content["base_model_name_or_path"] = name
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    logger.info("the adapter's base is %s", base_model_of(adapter))


def _evaluation(path: Path, out: Path, run: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return manifest and metrics of an evaluation. Raises ConfigError if it has other weights."""
    manifest, _ = read_evaluation(path)
    from search_r1.evaluation.manifest import weights_digest  # noqa: PLC0415 - torch

    known = {weights_digest(place) for place in (out, run / "model") if place.is_dir()}
    if manifest["model"].get("sha256") not in known:
        got = f"an evaluation of {Path(manifest['model']['name']).name} with other weights"
        fix = "evaluate the model that is pushed (--model RUN/model), or leave it out"
        raise ConfigError(explain(f"--evaluations {path}", got, "one of these weights", fix))
    return manifest, read_metrics(path)
