"""Checks, before a run starts, that options which name a metric name one that the run logs."""

from collections.abc import Collection, Iterator

from verl.config import Config
from verl.errors import ConfigError, PluginError, did_you_mean, explain
from verl.rewards.interface import RewardManager
from verl.trainer.metrics import ALL_WRONG, ALL_WRONG_UPDATE
from verl.types import Metrics

STATISTICS = ("mean", "min", "max")
WITH_STATISTICS = ("critic/score", "response_length", "observation_length", "critic/advantages",
                   "critic/returns", "critic/values")  # fmt: skip
STEP_NAMES = frozenset({
    *(f"{name}/{statistic}" for name in WITH_STATISTICS for statistic in STATISTICS),
    "prompt_length/mean", "reward/stage", "reward/overlong_penalty", "reward/overlong_share",
    "critic/kl", "critic/kl_coef", "critic/vf_loss",
    "critic/value_mean", "critic/return_mean", "critic/value_clip_fraction", "critic/grad_norm",
    "critic/lr", ALL_WRONG, ALL_WRONG_UPDATE, "critic/skipped_updates", "critic/num_micro_batches",
    "critic/computed_token_share",
})  # fmt: skip
"""Metrics of a training step whose names are known before it."""
OPEN_GROUPS = ("actor", "env", "fault", "guard", "perf", "rollout", "timing_s")
"""Groups of metrics whose names depend on the agent, the devices or options."""


def check_metric_names(config: Config, reward: RewardManager, sources: Collection[str]) -> None:
    """Raise ConfigError for a metric in the options that the run will not log.

    `sources` are the data sources of the validation. Components of a user's own reward are not
    known before it has scored, so that names under `val/` and `reward/` are then accepted here.
    """
    components = reward.component_names()
    for option, name in _named(config):
        if not _is_logged(name, components, sources):
            known = sorted({*STEP_NAMES, *_validation_names(components or (), sources)})
            known += [f"reward/{component}" for component in components or ()]
            if option == "trainer.best_metric":
                known = [metric for metric in known if metric.startswith("val/")]
            shown = ", ".join(known if len(known) <= 20 else [*known[:20], "…"])
            fix = did_you_mean(name, known, "choose one of docs/reference/metrics.md", cutoff=0.4)
            raise ConfigError(explain(option, name, f"a metric of this run ({shown})", fix))


def check_measured(best_metric: str, metrics: Metrics) -> None:
    """Raise PluginError if a validation lacks `trainer.best_metric`.

    Only a user's own reward can lack it, since other names were checked before the run.
    """
    if best_metric in metrics:
        return
    measured = sorted(name for name in metrics if name.startswith("val/"))
    fix = did_you_mean(best_metric, measured, "name one of them, and resume the run", cutoff=0.4)
    expected = f"a metric of the validation ({', '.join(measured)})"
    raise PluginError(explain("trainer.best_metric", best_metric, expected, fix))


def _named(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each option that names a metric, and the metric."""
    if config.trainer.test_freq != 0:
        yield "trainer.best_metric", config.trainer.best_metric
    for number, stage in enumerate(config.reward_model.stages):
        if stage.plateau is not None:
            yield f"reward_model.stages[{number}].plateau.metric", stage.plateau.metric


def _validation_names(components: Collection[str], sources: Collection[str]) -> set[str]:
    names = {"score", *components}
    of_sources = {f"val/{source}/{name}" for source in sources for name in names}
    return {f"val/{name}" for name in names} | {"val/num_rows"} | of_sources


def _is_logged(name: str, components: Collection[str] | None, sources: Collection[str]) -> bool:
    group, _, rest = name.partition("/")
    if group == "val":
        counts = ("env/", "fault/", *(f"{source}/env/" for source in sources))
        is_known = name in _validation_names(components or (), sources)
        return is_known or rest.startswith(counts) or components is None
    if group == "reward" and (components is None or rest in components):
        return True
    return name in STEP_NAMES or (group in OPEN_GROUPS and bool(rest))
