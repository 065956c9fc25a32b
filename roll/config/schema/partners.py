"""Keys of the partners of an environment: other policies, whose turns the environment asks for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll.config.schema.base import (
    NonNegativeInt,
    PositiveInt,
    Seconds,
    StrictConfig,
    VariableText,
)
from roll.config.schema.model import GeneratingConfig, ModelConfig
from roll.config.schema.strategies import ServingStrategy


class PartnerSamplingConfig(GeneratingConfig):
    """Sampling parameters of a partner."""

    max_new_tokens: PositiveInt = Field(512, description="Longest turn of the partner in tokens.")


class PartnerConfig(StrictConfig):
    """A partner of an environment.

    It is another policy, whose turns the environment asks for. None of its tokens is trained on.
    """

    type: Literal["inference", "api", "live"] = Field(
        description="What samples its turns: a fixed model that this run serves (`inference`), a model behind a URL "
        "(`api`), or the policy in training itself (`live`)."
    )
    model_args: ModelConfig | None = Field(
        None,
        description="`inference`, required: the model that this run serves.",
    )
    strategy_args: ServingStrategy | None = Field(
        None, description="`inference`, required: the backend that serves the model."
    )
    device_mapping: tuple[NonNegativeInt, ...] | None = Field(
        None,
        description="`inference`: GPUs of the model, as for a role. If not given, it runs on the CPU in `world_size` "
        "workers.",
    )
    world_size: PositiveInt | None = Field(
        None, description="`inference`: number of engines on the CPU; 1 if not given."
    )
    template: Literal["native", "chatml", "qwen2_5", "raw"] = Field(
        "native", description="`inference`: chat template of the model; see `template` of `data_args`."
    )
    generating_args: PartnerSamplingConfig | None = Field(
        None, description="`inference` and `api`: sampling parameters of its turns. `live` samples as the policy does."
    )
    api_url: str | None = Field(
        None,
        description="`api`, required: base URL of an OpenAI-compatible API (`https://host/v1`), or the full URL of its "
        "chat completions.",
    )
    model_name: str | None = Field(None, description="`api`, required: name of the model in the API.")
    api_key_variable: str | None = Field(
        None, description="`api`: environment variable with the API key; no key is sent if not given."
    )
    timeout: Seconds = Field(60.0, description="`api`: timeout of one request, in seconds.")
    retries: NonNegativeInt = Field(
        5, le=1000, description="`api`: number of retries of a request that failed temporarily."
    )
    concurrency: PositiveInt = Field(32, le=65536, description="`api`: number of concurrent requests.")
    max_calls: PositiveInt | None = Field(
        None,
        description="`api`: budget of requests, retries included; further episodes that need one fail. The count "
        "restarts if the run resumes or the calling process is replaced.",
    )
    system_envs: dict[str, VariableText] = Field(
        default_factory=dict, description="`inference` and `api`: environment variables of its processes."
    )
