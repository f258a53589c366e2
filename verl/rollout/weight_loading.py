"""vLLM worker extension: loads all weights in place.

A server that the user starts for a run gets it by `--worker-extension-cls` (see `vllm_server`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from verl.model_files import is_finite
from verl.training.weight_broadcast import SCHEME, WeightReceiver
from verl.training.weight_stream import device_key, receive

# tqdm's default lock is shared between processes; its semaphore would outlive a killed worker.
tqdm.set_lock(threading.RLock())


class WeightLoading:
    """Mixin for vLLM's worker class (`worker_extension_cls`)."""

    model_runner: Any
    vllm_config: Any
    reload_weights: Any
    device: Any
    _receiver: WeightReceiver | None = None

    def ping(self) -> bool:
        """Show that this process is alive."""
        return True

    def can_read(self, path: str) -> bool:
        """Whether this process can see the file `path`."""
        return Path(path).is_file()

    def non_finite_weights(self) -> list[str]:
        """Return the names of weights with NaN or infinite values; on CPU vLLM hides some."""
        named = self.model_runner.get_model().named_parameters()
        return [name for name, values in named if not is_finite(values)]

    def load_weights_in_place(self, weights_dir: str) -> None:
        """Reload all weights from a folder of safetensors."""
        if not Path(weights_dir).is_dir():  # vLLM would try to download it from the hub
            raise FileNotFoundError(f"no folder {weights_dir}")
        self._reload(weights_path=weights_dir)

    def card(self) -> str:
        """Return the device on which a rank must be for `receive_weights`."""
        return device_key(self.device)

    def receive_weights(self, stream: str) -> str:
        """Reload all weights from a rank's stream; return an error message, empty on success."""
        try:
            self._reload(weights_iterator=self._incoming(stream))
        except ConnectionError as error:
            return str(error)
        return ""

    def _reload(
        self, weights_path: str | None = None,
        weights_iterator: Iterator[tuple[str, Tensor]] | None = None,
    ) -> None:  # fmt: skip
        self.vllm_config.load_config.load_format = "auto"  # it may have started with random weights
        self.reload_weights(weights_path=weights_path, weights_iterator=weights_iterator)
        self._repack_head()

    def _incoming(self, stream: str) -> Iterator[tuple[str, Tensor]]:
        """Receive weights from the first rank's broadcast, or from the rank on this device."""
        if not stream.startswith(SCHEME):
            return receive(stream, self.device)
        if self._receiver is None or self._receiver.stream != stream:
            self._receiver = WeightReceiver(stream, self.device)
        return self._receiver.receive()

    def _repack_head(self) -> None:
        """Repack the output head on the CPU.

        A head that is tied to the embedding has no tensor of its own, so vLLM's reload skips it;
        but on the CPU the head keeps a packed copy of its weight, which would be outdated.
        """
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)
