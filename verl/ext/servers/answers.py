"""What a vLLM server answers about itself."""

from __future__ import annotations

from pydantic import AliasPath, BaseModel, Field

from verl.rollout.vllm_settings import WORKER_EXTENSION

SERVER_INFO_PATH = "/server_info?config_format=json"


class ServerInfo(BaseModel):
    """A server's settings, from its response to `/server_info?config_format=json`."""

    dtype: str = Field(validation_alias=AliasPath("vllm_config", "model_config", "dtype"))
    logprobs_mode: str = Field(
        validation_alias=AliasPath("vllm_config", "model_config", "logprobs_mode")
    )
    device: str | None = Field(validation_alias=AliasPath("vllm_config", "device_config", "device"))
    extension: str = Field(
        validation_alias=AliasPath("vllm_config", "parallel_config", "worker_extension_cls")
    )

    @property
    def loads_in_place(self) -> bool:
        """Whether the server has our worker extension; otherwise vLLM's own loading is used."""
        return self.extension == WORKER_EXTENSION


class WeightInfo(BaseModel):
    """A server's response to `/weight_info`."""

    weight_version: str
