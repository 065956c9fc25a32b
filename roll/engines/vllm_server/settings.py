"""The block of vLLM servers outside the run in the configuration, and the settings of their strategy.

The driver creates settings and sends them to a worker, which calls `build`. Importing this module imports no backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from roll.backend_settings import RoleModel, with_local_model
from roll.config.schema.backend import BackendConfig, BackendTraits, StrategyConfig
from roll.config.schema.base import PositiveInt
from roll.config.schema.model import ModelConfig

if TYPE_CHECKING:
    from roll.backend import GenerateStrategy, Rank
    from roll.config.derived.model_shape import ModelShape
    from roll.config.schema.pipelines import Config
    from roll.config.schema.roles import RoleConfig
    from roll.errors import Fault


class VllmServerConfig(BackendConfig):
    """Servers of vLLM (`vllm serve`) that were started outside the run and take its weights."""

    other_keys: ClassVar[str] = "give it to `vllm serve`; the run only talks to servers that are running"

    base_urls: tuple[str, ...] = Field(
        (),
        description="Addresses of the servers, such as `http://127.0.0.1:8001`, on the driver's host. The pool "
        "shrinks when one does not answer, and grows when it answers again. At the start one must answer.",
    )
    max_num_seqs: PositiveInt = Field(
        256, description="Largest number of sequences that one server generates concurrently, at most its own limit."
    )


@dataclass(frozen=True)
class VllmServerSettings:
    """Settings of `VllmServer`."""

    model_path: str
    model_args: ModelConfig
    base_urls: tuple[str, ...]
    """Address of each rank's server."""
    max_model_len: int
    max_num_seqs: int
    keeps_kv_cache: bool
    """Whether a response that spans a weight update keeps its KV cache. Otherwise, the cache is recomputed."""

    def build(self, rank: Rank) -> GenerateStrategy:
        """See `Settings`."""
        from roll.engines.vllm_server.strategy import VllmServer

        return VllmServer(with_local_model(self), rank)


class VllmServerStrategyConfig(StrategyConfig):
    """Generation with vLLM servers outside the run."""

    library: ClassVar[str] = "roll.engines.vllm_server.strategy"

    strategy_name: Literal["vllm_server"] = Field(description="Generate with vLLM servers outside the run.")
    strategy_config: VllmServerConfig = Field(
        default_factory=lambda: VllmServerConfig.model_validate({}), description="The servers."
    )

    @property
    def traits(self) -> BackendTraits:
        return BackendTraits(
            batches_by_tokens=False,
            own_kernels=True,
            pauses=True,
            most_requests=self.strategy_config.max_num_seqs,
            servers=self.strategy_config.base_urls,
        )

    def faults(self, name: str, role: RoleConfig, config: Config, shape: ModelShape | None) -> Iterable[Fault]:
        """See `OwnFaults`."""
        from roll.engines.vllm_server.checks import server_faults

        return server_faults(self.strategy_config, name, role, config)

    def unready(self, name: str, role: RoleConfig, config: Config) -> Iterable[Fault]:
        """See `OwnServices`."""
        from roll.engines.vllm_server.checks import unready_servers

        return unready_servers(self.strategy_config, name, role, config)

    def generate_settings(
        self, model: RoleModel, context: int, adapter_rank: int | None, keeps_kv_cache: bool
    ) -> VllmServerSettings:
        """See `GenerateBackend`."""
        assert adapter_rank is None, "a server takes whole weights only"
        block = self.strategy_config
        return VllmServerSettings(
            model.path, model.arguments, block.base_urls, context, block.max_num_seqs, keeps_kv_cache
        )
