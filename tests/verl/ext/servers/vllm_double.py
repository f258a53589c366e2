"""An in-memory vLLM server with the endpoints that a run uses; it records its requests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from verl.rollout.vllm_settings import WORKER_EXTENSION


@dataclass
class VllmDouble:
    """A fake server whose responses may be changed at any time.

    `broken` maps paths to the error status of their responses.
    """

    dtype: str = "torch.float32"
    device: str = "cuda"
    logprobs_mode: str = "raw_logprobs"
    extension: str = WORKER_EXTENSION
    max_model_len: int = 1000
    key: str = ""
    sees_files: bool = True
    is_away: bool = False
    weights: str = "default"
    choice: dict[str, Any] = field(default_factory=lambda: {
        "text": "<answer> a </answer>", "finish_reason": "stop", "token_ids": [7, 8],
        "logprobs": {"token_logprobs": [-0.5, -0.25]},
    })  # fmt: skip
    broken: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = json.loads(request.content) if request.content else None
        if self.is_away:
            raise httpx.ConnectError("refused")
        self.asked.append((path, body))
        if path in self.broken:
            return httpx.Response(self.broken[path], text="broken")
        if path.startswith("/v1") and request.headers.get("Authorization", "")[7:] != self.key:
            return httpx.Response(401)
        return httpx.Response(200, json=self._answer(path, body))

    def _answer(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "policy", "max_model_len": self.max_model_len}]}
        if path == "/server_info":
            parts = {
                "model_config": {"dtype": self.dtype, "logprobs_mode": self.logprobs_mode},
                "device_config": {"device": self.device},
                "parallel_config": {"worker_extension_cls": self.extension},
            }
            return {"vllm_config": parts}
        if path == "/update_weight_version":
            self.weights = body["new_version"]
        if path == "/weight_info":
            return {"weight_version": self.weights}
        if path == "/v1/completions":
            assert not set(body["cache_salt"]) & set("@/\\") and len(body["cache_salt"]) <= 128
        if path == "/collective_rpc":
            return {"results": [str(self.sees_files)]}
        return {"choices": [self.choice]} if path == "/v1/completions" else {}

    def paths(self) -> list[str]:
        """Return the requested paths, in order."""
        return [path for path, _ in self.asked]
