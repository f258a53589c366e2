"""MLflow: the server of `MLFLOW_TRACKING_URI`, else `mlflow.db` in the run's folder."""

import os
import re
from collections.abc import Mapping

from verl.config.known import flatten
from verl.monitor.tracking import TrackedRun, Tracker, package


class MlflowTracker(Tracker):
    """A run of MLflow. Steps that a server has missed are sent with the next one."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # the defaults are minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self._mlflow, self._unsent = package("mlflow"), list[tuple[dict[str, float], int]]()
        server = os.environ.get("MLFLOW_TRACKING_URI")
        self._mlflow.set_tracking_uri(server or f"sqlite:///{run.directory}/mlflow.db")
        self._id = run.library_id("mlflow", lambda: self._create(run))
        self._mlflow.MlflowClient().update_run(self._id, status="RUNNING")

    def _create(self, run: TrackedRun) -> str:
        number = self._mlflow.set_experiment(run.project).experiment_id
        created = self._mlflow.MlflowClient().create_run(number, run_name=run.experiment)
        self._mlflow.log_params(dict(flatten(run.options)), run_id=created.info.run_id)
        return str(created.info.run_id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        valid = {re.sub(r"[^\w./ :-]", "_", name): value for name, value in metrics.items()}
        self._unsent.append((valid, step))
        while self._unsent:
            self._mlflow.log_metrics(*self._unsent[0], run_id=self._id)
            del self._unsent[0]

    def close(self) -> None:
        self._mlflow.MlflowClient().set_terminated(self._id)
