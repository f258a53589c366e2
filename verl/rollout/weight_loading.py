"""What runs inside vLLM's workers: loading new weights in place, completely, and a kernel for CPUs.

A server that the user starts for a run has it by `--worker-extension-cls` (`vllm_server`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from verl.model_files import is_finite
from verl.training.weight_broadcast import SCHEME, WeightReceiver
from verl.training.weight_stream import device_key, receive

# A worker's progress bars need no lock between processes: its semaphore outlives a worker's kill.
tqdm.set_lock(threading.RLock())


class WeightLoading:
    """Mixed into vLLM's worker class (`worker_extension_cls`)."""

    model_runner: Any
    reload_weights: Any
    device: Any
    _receiver: WeightReceiver | None = None

    def answer(self) -> bool:
        """Show that this process is alive."""
        return True

    def can_read(self, path: str) -> bool:
        """Whether this process sees the file `path`."""
        return Path(path).is_file()

    def faulty_weights(self) -> list[str]:
        """Names of weights with values that are no finite numbers; on CPU vLLM hides some."""
        named = self.model_runner.get_model().named_parameters()
        return [name for name, values in named if not is_finite(values)]

    def load_weights_in_place(self, weights_dir: str) -> None:
        """Reload all weights from a folder of safetensors."""
        if not Path(weights_dir).is_dir():  # vLLM would take it for a model of the hub
            raise FileNotFoundError(f"no folder {weights_dir}")
        self.reload_weights(weights_path=weights_dir)
        self._pack_head()

    def card(self) -> str:
        """The device that a rank must be on for `receive_weights`."""
        return device_key(self.device)

    def receive_weights(self, stream: str) -> str:
        """Reload all weights from what a rank sends; returns why they did not come whole, if so."""
        try:
            self.reload_weights(weights_iterator=self._coming(stream))
        except ConnectionError as error:
            return str(error)
        self._pack_head()
        return ""

    def _coming(self, stream: str) -> Iterator[tuple[str, Tensor]]:
        """From the first rank of the run, or from the one on this device."""
        if not stream.startswith(SCHEME):
            return receive(stream, self.device)
        if self._receiver is None or self._receiver.stream != stream:
            self._receiver = WeightReceiver(stream, self.device)
        return self._receiver.receive()

    def repair_verification(self) -> None:
        """Have vLLM's CPU build verify guesses at the temperature that was asked for.

        Its kernel spreads floats over tokens by way of integers, into a copy that nobody reads
        (0.32): a temperature is then whatever the memory held.
        """
        from vllm.v1.sample import rejection_sampler  # noqa: PLC0415 - the worker has it

        rejection_sampler.expand_batch_to_tokens = spread

    def _pack_head(self) -> None:
        """A head that is tied to the embedding is no tensor of its own, so vLLM's reload passes it
        over; on CPU the head keeps a packed copy of its weight, which has to be made anew."""
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)


def spread(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Each request's value for each of its tokens, with one value replaced: (num_tokens,).

    x: (num_requests,); cu_num_tokens: (num_requests,), the sums of their numbers of tokens.
    """
    lengths = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, replace_to, x)
    return replaced.repeat_interleave(lengths, output_size=num_tokens)
