"""vLLM worker extension: loads all weights in place.

A server that the user starts for a run gets it by `--worker-extension-cls` (`verl.ext.servers`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor
from tqdm import tqdm

from verl.rollout.weight_check import WeightCheck
from verl.training import devices
from verl.weights.files import ADDRESS, transport_class

# tqdm's default lock is shared between processes; its semaphore would outlive a killed worker.
tqdm.set_lock(threading.RLock())


class WeightLoading(WeightCheck):
    """Mixin for vLLM's worker class (`worker_extension_cls`)."""

    vllm_config: Any
    reload_weights: Any
    device: Any
    _receivers: Mapping[str, Any] = MappingProxyType({})

    def ping(self) -> bool:
        """Show that this process is alive."""
        return True

    def can_read(self, path: str) -> bool:
        """Whether this process can see the file `path`."""
        return Path(path).is_file()

    def device_id(self) -> str:
        """Return the id of this worker's device, on which ranks and workers agree."""
        return devices.device_id(self.device)

    def load_weights_in_place(self, source: str) -> str:
        """Reload all weights from a folder of safetensors, or from a transport's `NAME://ADDRESS`.

        Returns what went wrong with the transport; empty on success.
        """
        name, is_stream, address = source.partition(ADDRESS)
        try:
            if is_stream:
                self._reload(weights_iterator=self._receiver(name).receive(address))
            elif not Path(source).is_dir():  # vLLM would try to download it from the hub
                raise FileNotFoundError(f"no folder {source}")
            else:
                self._reload(weights_path=source)
        except ConnectionError as error:
            return str(error)
        return ""

    def _receiver(self, name: str) -> Any:
        """Return the transport's part in this worker, which is kept for the next weights."""
        if name not in self._receivers:
            build = transport_class(name).receiver
            assert build is not None, f"the transport {name} sends addresses, but has no receiver"
            self._receivers = {**self._receivers, name: build(self.device)}
        return self._receivers[name]

    def _reload(
        self, weights_path: str | None = None,
        weights_iterator: Iterator[tuple[str, Tensor]] | None = None,
    ) -> None:  # fmt: skip
        self.vllm_config.load_config.load_format = "auto"  # it may have started with random weights
        self.reload_weights(weights_path=weights_path, weights_iterator=weights_iterator)
        self._repack_head()

    def _repack_head(self) -> None:
        """Repack the output head on the CPU.

        A head that is tied to the embedding has no tensor of its own, so vLLM's reload skips it;
        but on the CPU the head keeps a packed copy of its weight, which would be outdated.
        """
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)
