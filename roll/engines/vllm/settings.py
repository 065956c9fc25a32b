"""The block of vLLM in the configuration, and the settings of its strategies.

The driver creates settings and sends them to a worker, which calls `build`. Importing this module imports no backend.
Only `build` imports the strategy, in the process that runs it. Functions and classes in settings are pickled by name,
so they must be defined at the top level of a module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from roll.backend_settings import RoleModel, with_local_model
from roll.config.schema.backend import BackendConfig, BackendTraits, EngineMemory, StrategyConfig
from roll.config.schema.base import Passed, PositiveFloat, PositiveInt, Ranks, StrictConfig
from roll.config.schema.model import ModelConfig
from roll.engines.vllm.fork_server import start_fork_server
from roll.system.sizes import GIB

if TYPE_CHECKING:
    from roll.backend import GenerateStrategy, Rank, RewardStrategy
    from roll.config.derived.model_shape import ModelShape
    from roll.config.schema.pipelines import Config
    from roll.config.schema.roles import RoleConfig
    from roll.errors import Fault


CPU_BLOCK = 32
"""vLLM's attention on the CPU takes only KV-cache blocks of a multiple of this number of tokens."""
CACHE_ARGUMENT = "kv_cache_memory_bytes"
"""Argument of `engine_args` with the size of the KV cache on a GPU."""


class SpeculativeConfig(StrictConfig):
    """Speculative decoding, on GPUs: a draft proposes tokens, and the engine's model verifies them in one forward pass.

    Samples keep the model's distribution, and their log-probs are the model's (Leviathan et al., arXiv 2211.17192).
    """

    method: Literal["ngram", "draft_model", "eagle3"] = Field(
        description="What proposes tokens. `ngram`: what followed the last tokens where they stood earlier in the same "
        "sequence. `draft_model`: a smaller model of the same vocabulary. `eagle3`: a head that reads hidden states of "
        "the model."
    )
    draft: str | None = Field(
        None,
        description="Folder of the draft's weights, for `draft_model` and `eagle3`. No weight sync changes them, so "
        "fewer of its tokens are accepted as training goes on.",
    )
    tokens: PositiveInt = Field(4, description="Number of tokens that are proposed at a time.")
    longest_match: PositiveInt = Field(
        4, description="`ngram`: largest number of last tokens that are looked for in the sequence."
    )

    @property
    def draft_bytes(self) -> int:
        """Return the size of the draft's weights; 0 without a draft."""
        return sum(file.stat().st_size for file in Path(self.draft).glob("*.safetensors")) if self.draft else 0

    @property
    def draft_cache(self) -> int:
        """Return how many numbers of KV cache the draft has for a token; 0 without a draft whose shape is known."""
        from roll.config.derived.model_shape import read_shape

        try:
            shape = read_shape(Path(self.draft) / "config.json") if self.draft else None
        except ValueError:  # `faults` reports it
            shape = None
        return shape.kv_bytes(1, 1) if shape else 0

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's `speculative_config`."""
        shared = {"method": self.method, "num_speculative_tokens": self.tokens}
        if self.draft is not None:
            return shared | {"model": self.draft}
        return shared | {"prompt_lookup_max": self.longest_match, "prompt_lookup_min": 1}


class VllmConfig(BackendConfig):
    """Settings of vLLM.

    `engine_args` passes further settings to vLLM's `AsyncEngineArgs`.
    """

    other_keys: ClassVar[str] = "if it is an argument of vLLM's AsyncEngineArgs, put it under engine_args"

    tensor_parallel_size: Ranks = Field(1, description="Number of GPUs per engine, over which its layers are sharded.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9,
        description="Fraction of a GPU's memory that the engine may use. Lower it if other roles stay on the same GPU. "
        "Without effect if `engine_args` has `kv_cache_memory_bytes`.",
    )
    kv_cache_gib: PositiveFloat = Field(1.0, description="Memory for the KV cache in GiB, on the CPU only.")
    max_model_len: PositiveInt | None = Field(
        None,
        description="Largest context length in tokens: prompt and response, or episode. If not given, the largest "
        "that the run can need.",
    )
    max_num_seqs: PositiveInt = Field(
        512, description="Largest number of sequences that one engine generates concurrently."
    )
    max_num_batched_tokens: PositiveInt = Field(
        8192,
        description="Largest number of tokens in one engine step. On the CPU at least `max_model_len`, because "
        "prefill is not chunked there.",
    )
    block_size: PositiveInt | None = Field(
        None,
        description="Number of tokens per KV-cache block; vLLM's default if not given. On the CPU it is rounded up to "
        "a multiple of 32.",
    )
    enforce_eager: bool = Field(
        False, description="Do not compile the model or capture CUDA graphs: starts faster, generates more slowly."
    )
    compile_model: bool = Field(
        True,
        description="Compile the model. `false`: vLLM's kernels as they are, recorded in CUDA graphs for decoding, as "
        "`model_args.engine_kernels` of the trainer needs them.",
    )
    enable_prefix_caching: bool = Field(
        True,
        description="Share the KV cache of common prefixes, such as the prompt of a group and earlier turns of an "
        "episode.",
    )
    load_format: Literal["auto", "dummy", "safetensors"] = Field(
        "auto",
        description="How the engine loads its initial weights. `dummy` skips this; the first weight sync then sets "
        "them.",
    )
    quantization: Literal["fp8"] | None = Field(
        None,
        description="`fp8`: linear layers multiply in 8 bits, weights with a scale for each output, activations with "
        "one for each token. Routers, embeddings and heads keep `dtype`. Each weight sync quantises anew.",
    )
    speculative: SpeculativeConfig | None = Field(
        None, description="Speculative decoding. If not given, each forward pass samples one token of a sequence."
    )
    batch_invariant: bool = Field(
        False,
        description="Use vLLM's batch-invariant kernels, on GPUs: a response and its log-probs do not depend on what "
        "else the engine computes at the same time. With `seeded`, they are then the same in each run. Slower.",
    )
    disable_custom_all_reduce: bool = Field(
        False, description="Use NCCL's all-reduce in tensor parallelism instead of vLLM's own."
    )
    engine_args: dict[str, Passed] = Field(
        default_factory=dict,
        description="Additional arguments of vLLM's `AsyncEngineArgs`. Those that roll sets itself are refused.",
    )

    @property
    def cpu_block_size(self) -> int | None:
        """Return the number of tokens per KV-cache block on the CPU. None for vLLM's default."""
        return self.block_size and -(-self.block_size // CPU_BLOCK) * CPU_BLOCK

    @property
    def kv_cache_bytes(self) -> int | None:
        """Return the size of the KV cache on a GPU, if `engine_args` sets it."""
        size = self.engine_args.get(CACHE_ARGUMENT)
        return size if isinstance(size, int) else None

    def start_fork_server(self, on_cpu: bool) -> None:
        """Start the process from which the engine will be forked. On GPUs, vLLM compiles its sampler in any case."""
        start_fork_server(not (on_cpu and self.enforce_eager), self.batch_invariant)


@dataclass(frozen=True)
class VllmSettings:
    """Settings of `VllmGenerate`."""

    model_path: str
    model_args: ModelConfig
    engine: VllmConfig
    max_model_len: int
    adapter_rank: int | None
    """LoRA rank of the adapters that the engine will load. None if it loads whole models."""
    seed: int
    takes_turns: bool
    """Whether other roles use the role's devices while it does not generate."""
    keeps_kv_cache: bool
    """Whether a response that spans a weight update keeps its KV cache. Otherwise, the cache is recomputed."""
    returns_routes: bool = False
    """Whether completions have `routes`."""

    def build(self, rank: Rank) -> GenerateStrategy:
        """See `Settings`."""
        self.engine.start_fork_server(rank.device == "cpu")
        from roll.engines.vllm.strategy import VllmGenerate

        return VllmGenerate(with_local_model(self), rank)


@dataclass(frozen=True)
class VllmRewardSettings:
    """Settings of `VllmReward`."""

    model_path: str
    model_args: ModelConfig
    engine: VllmConfig
    max_model_len: int
    seed: int
    takes_turns: bool
    """Whether other roles use the role's devices while it does not score."""

    def build(self, rank: Rank) -> RewardStrategy:
        """See `Settings`."""
        self.engine.start_fork_server(rank.device == "cpu")
        from roll.engines.vllm.strategy import VllmReward

        return VllmReward(with_local_model(self), rank)


class VllmStrategyConfig(StrategyConfig):
    """Generation with vLLM."""

    library: ClassVar[str] = "roll.engines.vllm.strategy"

    strategy_name: Literal["vllm"] = Field(description="Generate with vLLM.")
    strategy_config: VllmConfig = Field(
        default_factory=lambda: VllmConfig.model_validate({}), description="Settings of the engine."
    )

    def preload(self, on_cpu: bool) -> None:
        """See `StrategyConfig`."""
        self.strategy_config.start_fork_server(on_cpu)
        super().preload(on_cpu)

    @property
    def traits(self) -> BackendTraits:
        engine = self.strategy_config
        return BackendTraits(
            devices_per_rank=engine.tensor_parallel_size,
            batches_by_tokens=False,
            own_kernels=True,
            pauses=True,
            loads_adapters=True,
            discards_weights=True,
            returns_routes=True,
            invariance_key=""
            if engine.batch_invariant or engine.quantization or engine.speculative
            else "batch_invariant",
            runs_plain_kernels=engine.batch_invariant
            and (engine.enforce_eager or not engine.compile_model)
            and engine.tensor_parallel_size == 1
            and engine.engine_args.keys() <= {CACHE_ARGUMENT},
            shares_device=engine.tensor_parallel_size == 1 and engine.kv_cache_bytes is not None,
            most_requests=engine.max_num_seqs,
            context=engine.max_model_len,
            memory=EngineMemory(
                engine.gpu_memory_utilization,
                "gpu_memory_utilization",
                cpu_cache=int(engine.kv_cache_gib * GIB),
                cache_key=f"engine_args.{CACHE_ARGUMENT}",
                cache=engine.kv_cache_bytes,
                linear_width=None if engine.quantization is None else 1,
                draft=engine.speculative.draft_bytes if engine.speculative else 0,
                draft_cache=engine.speculative.draft_cache if engine.speculative else 0,
            ),
        )

    def faults(self, name: str, role: RoleConfig, config: Config, shape: ModelShape | None) -> Iterable[Fault]:
        """See `OwnFaults`."""
        from roll.engines.vllm.checks import vllm_faults

        return vllm_faults(self.strategy_config, name, role, config, shape)

    def warnings(self, name: str, role: RoleConfig) -> Iterable[str]:
        """See `OwnWarnings`."""
        from roll.engines.vllm.checks import vllm_warnings

        return vllm_warnings(self.strategy_config, name, role)

    def missing(self, name: str, role: RoleConfig, shape: ModelShape | None) -> Iterable[Fault]:
        """See `OwnNeeds`."""
        from roll.engines.vllm.checks import missing_in_vllm

        return missing_in_vllm(name, role, shape)

    def generate_settings(
        self, model: RoleModel, context: int, adapter_rank: int | None, keeps_kv_cache: bool
    ) -> VllmSettings:
        """See `GenerateBackend`."""
        engine = self.strategy_config
        return VllmSettings(
            model.path,
            model.arguments,
            engine,
            max_model_len=context,
            adapter_rank=adapter_rank,
            seed=model.seed,
            takes_turns=model.takes_turns,
            keeps_kv_cache=keeps_kv_cache,
            returns_routes=model.replays_routes,
        )

    def reward_settings(self, model: RoleModel, context: int, token_budget: int | None) -> VllmRewardSettings:
        """See `RewardBackend`."""
        return VllmRewardSettings(
            model.path, model.arguments, self.strategy_config, context, model.seed, model.takes_turns
        )
