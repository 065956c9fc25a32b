"""The parts of vLLM 0.32 that roll imports, calls, overrides or reads, and how vLLM declares them."""

from __future__ import annotations

DECLARED = {
    "vllm/__init__.py": {
        "AsyncEngineArgs": "from vllm.engine.arg_utils",
        "PoolingParams": "from vllm.pooling_params",
        "SamplingParams": "from vllm.sampling_params",
    },
    "vllm/envs.py": {"VLLM_LOGGING_LEVEL": "str", "VLLM_BATCH_INVARIANT": "bool", "enable_envs_cache": "()"},
    "vllm/utils/nccl.py": {"unpinned_nccl_env": "() -> Iterator[None]"},
    "vllm/model_executor/determinism/batch_invariant.py": {
        "linear_batch_invariant": "(input, weight, bias=None)",
        "rms_norm_batch_invariant": "(input, weight, eps=1e-06, residual=None) -> torch.Tensor | "
        "tuple[torch.Tensor, torch.Tensor]",
    },
    "vllm/_custom_ops.py": {
        "fused_add_rms_norm": "(input, residual, weight, epsilon)",
        "rotary_embedding": "(positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=0, "
        "inverse=False)",
    },
    "vllm/v1/worker/gpu/sample/logprob.py": {"compute_token_logprobs": "(logits, token_ids) -> torch.Tensor"},
    "vllm/v1/attention/backends/fa_utils.py": {
        "get_flash_attn_version": "(requires_alibi=False, head_size=None, head_size_v=None, has_sinks=False, "
        "requires_softcap=False, kv_cache_block_size=None, supports_fa4_hd256=False) -> int | None"
    },
    "vllm/plugins/__init__.py": {"DEFAULT_PLUGINS_GROUP": "'vllm.general_plugins'"},
    "vllm/distributed/weight_transfer/factory.py": {
        "WeightTransferEngineFactory": "class ()",
        "WeightTransferEngineFactory._registry": "dict[str, Callable[[], type[WeightTransferEngine]]]",
        "WeightTransferEngineFactory.register_engine": "(cls, name, module_path_or_cls, class_name=None)",
    },
    "vllm/distributed/weight_transfer/base.py": {
        "WeightTransferEngine": "class (ABC, Generic[TInitInfo, TUpdateInfo])",
        "WeightTransferEngine.init_info_cls": "type[TInitInfo]",
        "WeightTransferEngine.update_info_cls": "type[TUpdateInfo]",
        "WeightTransferEngine.supports_draft_weight_update": "bool",
        "WeightTransferEngine.parallel_config": "ParallelConfig",
        "WeightTransferEngine.model_config": "vllm_config.model_config",
        "WeightTransferEngine.device": "device",
        "WeightTransferEngine.model": "model",
        "WeightTransferEngine.parse_update_info": "(self, update_dict) -> TUpdateInfo",
        "WeightTransferEngine.init_transfer_engine": "(self, init_info)",
        "WeightTransferEngine.start_weight_update": "(self)",
        "WeightTransferEngine.update_weights": "(self, update_info)",
        "WeightTransferEngine.receive_weights": "(self, update_info)",
        "WeightTransferEngine.finish_weight_update": "(self)",
        "WeightTransferEngine.shutdown": "(self)",
        "WeightTransferInitInfo": "class (ABC)",
        "WeightTransferUpdateInfo": "class (ABC)",
        "WeightTransferInitRequest": "class ()",
        "WeightTransferUpdateRequest": "class ()",
    },
    "vllm/config/parallel.py": {"ParallelConfig.rank": "int"},
    "vllm/entrypoints/scale_out/token_in_token_out/protocol.py": {
        "GenerateRequest.token_ids": "list[int]",
        "GenerateRequest.sampling_params": "SamplingParams",
        "GenerateRequest.cache_salt": "str | None",
        "GenerateChoiceBase.token_ids": "list[int] | None",
        "GenerateChoiceBase.finish_reason": "str | None",
        "GenerateChoiceBase.weight_versions": "list[WeightVersionSpan] | None",
        "GenerateLogProbsContent": "class (GenerateLogProb)",
        "GenerateLogProb.token_id": "int",
        "GenerateLogProb.logprob": "float",
    },
    "vllm/model_executor/model_loader/reload/__init__.py": {
        "initialize_layerwise_reload": "from .layerwise",
        "finalize_layerwise_reload": "from .layerwise",
    },
    "vllm/model_executor/model_loader/reload/layerwise.py": {
        "initialize_layerwise_reload": "(model)",
        "finalize_layerwise_reload": "(*args, **kwargs)",
        "finalize_layerwise_processing": "(model, model_config)",
        "get_layerwise_info": "(layer) -> LayerReloadingInfo",
    },
    "vllm/model_executor/model_loader/reload/types.py": {
        "LayerReloadingInfo.load_numel": "int",
        "LayerReloadingInfo.load_numel_total": "int | None",
    },
    "vllm/model_executor/models/interfaces.py": {"SupportsLoRA.packed_modules_mapping": "dict[str, list[str]]"},
    "vllm/model_executor/models/qwen3_vl.py": {
        "Qwen3VLForConditionalGeneration.hf_to_vllm_mapper": "WeightsMapper(orig_to_new_prefix={'model.visual.': "
        "'visual.', "
        "'lm_head.': 'language_model.lm_head.', 'model.language_model.': 'language_model.model.'})"
    },
    "vllm/model_executor/models/qwen2.py": {"Qwen2ForCausalLM.load_weights": "(self, weights) -> set[str]"},
    "vllm/model_executor/layers/vocab_parallel_embedding.py": {
        "ParallelLMHead": "class (VocabParallelEmbedding)",
        "VocabParallelEmbedding.quant_method": "QuantizeMethodBase",
        "UnquantizedEmbeddingMethod.process_weights_after_loading": "(self, layer)",
    },
    "vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py": {
        "UnquantizedFusedMoEMethod": "class (FusedMoEMethodBase, CustomOp)"
    },
    "vllm/model_executor/layers/fused_moe/fused_moe_method_base.py": {
        "FusedMoEMethodBase.moe_kernel": "mk.FusedMoEKernel | None"
    },
    "vllm/v1/engine/async_llm.py": {
        "AsyncLLM": "class (EngineClient)",
        "AsyncLLM.from_engine_args": (
            "(cls, engine_args, start_engine_loop=True, usage_context=UsageContext.ENGINE_CONTEXT, stat_loggers=None) "
            "-> 'AsyncLLM'"
        ),
        "AsyncLLM.generate": (
            "async (self, prompt, sampling_params, request_id, *, prompt_text=None, lora_request=None, "
            "tokenization_kwargs=None, "
            "trace_headers=None, priority=0, data_parallel_rank=None, session_id=None, kv_hints=None, "
            "reasoning_ended=None, reasoning_parser_kwargs=None) -> AsyncGenerator[RequestOutput, None]"
        ),
        "AsyncLLM.encode": (
            "async (self, prompt, pooling_params, request_id, lora_request=None, trace_headers=None, priority=0, "
            "tokenization_kwargs=None, reasoning_ended=None) -> AsyncGenerator[PoolingRequestOutput, None]"
        ),
        "AsyncLLM.errored": "(self) -> bool",
        "AsyncLLM.engine_core": (
            "EngineCoreClient.make_async_mp_client(vllm_config=vllm_config, executor_class=executor_class, "
            "log_stats=self.log_stats, client_addresses=client_addresses, client_count=client_count, "
            "client_index=client_index, renderer=renderer)"
        ),
        "AsyncLLM.pause_generation": "async (self, *, mode='abort', clear_cache=True)",
        "AsyncLLM.resume_generation": "async (self)",
        "AsyncLLM.reset_prefix_cache": "async (self, reset_running_requests=False, reset_connector=False) -> bool",
        "AsyncLLM.sleep": "async (self, level=1, mode='abort')",
        "AsyncLLM.wake_up": "async (self, tags=None) -> bool",
        "AsyncLLM.add_lora": "async (self, lora_request) -> bool",
        "AsyncLLM.list_loras": "async (self) -> set[int]",
        "AsyncLLM.init_weight_transfer_engine": "async (self, request)",
        "AsyncLLM.start_weight_update": "async (self)",
        "AsyncLLM.update_weights": "async (self, request)",
        "AsyncLLM.update_weight_version": "async (self, new_version)",
        "AsyncLLM.finish_weight_update": "async (self, weight_version=None)",
        "AsyncLLM.shutdown": "(self, timeout=None)",
        "AsyncLLM.output_processor": (
            "OutputProcessor(renderer.tokenizer, log_stats=self.log_stats, "
            "stream_interval=self.vllm_config.scheduler_config.stream_interval, "
            "tracing_enabled=tracing_endpoint is not None, admission_stats=self.admission_stats)"
        ),
    },
    "vllm/v1/engine/core_client.py": {
        "AsyncMPClient.pause_scheduler_async": "async (self, mode='abort', clear_cache=True)"
    },
    "vllm/v1/engine/output_processor.py": {
        "OutputProcessor.request_states": "dict[str, RequestState]",
        "RequestState.prompt_len": "length_from_prompt_token_ids_or_embeds(self.prompt_token_ids, self.prompt_embeds)",
        "RequestState.stats": "RequestStateStats(arrival_time=arrival_time) if log_stats else None",
    },
    "vllm/v1/metrics/loggers.py": {
        "PrometheusStatLogger": "class (AggregateStatLoggerBase)",
        "PrometheusStatLogger.record": "(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0)",
        "PrometheusStatLogger.record_sleep_state": "(self, sleep=0, level=0)",
        "PrometheusStatLogger.record_admission_rejection": "(self, reason)",
        "PrometheusStatLogger.log_engine_initialized": "(self)",
        "StatLoggerManager": "class ()",
    },
    "vllm/v1/metrics/stats.py": {
        "SchedulerStats": "class ()",
        "SchedulerStats.num_running_reqs": "int",
        "SchedulerStats.num_waiting_reqs": "int",
        "SchedulerStats.num_skipped_waiting_reqs": "int",
        "SchedulerStats.kv_cache_usage": "float",
        "SchedulerStats.prefix_cache_stats": "PrefixCacheStats",
        "SchedulerStats.spec_decoding_stats": "SpecDecodingStats | None",
        "PrefixCacheStats.preempted_queries": "int",
        "PrefixCacheStats.preempted_hits": "int",
        "IterationStats": "class ()",
        "IterationStats.num_generation_tokens": "0",
        "IterationStats.num_preempted_reqs": "0",
        "IterationStats.prompt_token_stats": "PromptTokenStats()",
        "PromptTokenStats.computed": "int",
        "RequestStateStats.num_generation_tokens": "int",
        "MultiModalCacheStats": "class (BaseCacheStats)",
    },
    "vllm/v1/spec_decode/metrics.py": {
        "SpecDecodingStats": "class ()",
        "SpecDecodingStats.num_draft_tokens": "int",
        "SpecDecodingStats.num_accepted_tokens": "int",
    },
    "vllm/v1/engine/__init__.py": {
        "PauseMode": "Literal['abort', 'wait', 'keep']",
        "FINISH_REASON_STRINGS": "('stop', 'length', 'abort', 'error', 'repetition')",
    },
    "vllm/v1/engine/utils.py": {
        "get_mp_context": "from vllm.utils.system_utils",
        "CoreEngineProcManager": "class ()",
    },
    "vllm/platforms/__init__.py": {"current_platform": "Platform"},
    "vllm/platforms/interface.py": {
        "Platform.is_cpu": "(self) -> bool",
        "Platform.get_punica_wrapper": "(cls) -> str",
    },
    "vllm/lora/punica_wrapper/punica_cpu.py": {
        "PunicaWrapperCPU": "class (PunicaWrapperBase)",
        "PunicaWrapperCPU._apply_shrink": "(self, y, x, w_t_all, scale)",
        "PunicaWrapperCPU._apply_expand": "(self, y, x, w_t_all, y_offset, y_slice_size, add_inputs=True)",
    },
    "vllm/lora/punica_wrapper/punica_base.py": {
        "PunicaWrapperBase.update_metadata": "(self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)",
    },
    "vllm/lora/layers/__init__.py": {"LoRAMapping": "from vllm.lora.layers.utils"},
    "vllm/lora/layers/utils.py": {"LoRAMapping.index_mapping": "tuple[int, ...]"},
    "vllm/v1/executor/uniproc_executor.py": {"UniProcExecutor": "class (Executor)"},
    "vllm/v1/executor/abstract.py": {"SLEEP_TAGS": "frozenset(('weights', 'kv_cache'))"},
    "vllm/engine/arg_utils.py": {"AsyncEngineArgs": "class (EngineArgs)"},
    "vllm/config/__init__.py": {
        "WeightTransferConfig": "from vllm.config.weight_transfer",
        "VllmConfig": "from vllm.config.vllm",
    },
    "vllm/config/lora.py": {"MaxLoRARanks": "Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]"},
    "vllm/config/model.py": {
        "LogprobsMode": "Literal['raw_logits', 'raw_logprobs', 'processed_logits', 'processed_logprobs']",
        "ModelConfig.hf_config": "PreTrainedConfig",
    },
    "vllm/inputs/__init__.py": {"TokensPrompt": "from .llm"},
    "vllm/inputs/llm.py": {"TokensPrompt": "class (_PromptOptions)"},
    "vllm/lora/request.py": {"LoRARequest": "class (msgspec.Struct)"},
    "vllm/sampling_params.py": {
        "SamplingParams": "class (PydanticMsgspecMixin, msgspec.Struct)",
        "RequestOutputKind": "class (Enum)",
        "RequestOutputKind.FINAL_ONLY": "2",
    },
    "vllm/pooling_params.py": {"PoolingParams": "class (msgspec.Struct)"},
    "vllm/outputs.py": {
        "PoolingOutput.data": "torch.Tensor",
        "PoolingRequestOutput.finished": "finished",
        "PoolingRequestOutput.outputs": "outputs",
        "RequestOutput.outputs": "outputs",
        "CompletionOutput": "class ()",
        "CompletionOutput.token_ids": "GenericSequence[int]",
        "CompletionOutput.logprobs": "SampleLogprobs | None",
        "CompletionOutput.finish_reason": "str | None",
        "CompletionOutput.weight_versions": "list[WeightVersionSpan] | None",
        "WeightVersionSpan.version": "str",
        "WeightVersionSpan.start": "int",
        "WeightVersionSpan.end": "int",
    },
    "vllm/logprobs.py": {
        "FlatLogprobs": "class (MutableSequence[LogprobsOnePosition | None])",
        "FlatLogprobs.logprobs": "list[float]",
    },
}
"""All vLLM names that roll relies on, by file: functions with parameters, classes with bases, other names with their
type or value.
"""
FIELDS = {
    "AsyncEngineArgs": ("vllm/engine/arg_utils.py", "EngineArgs"),
    "SamplingParams": ("vllm/sampling_params.py", "SamplingParams"),
    "PoolingParams": ("vllm/pooling_params.py", "PoolingParams"),
    "LoRARequest": ("vllm/lora/request.py", "LoRARequest"),
    "TokensPrompt": ("vllm/inputs/llm.py", "TokensPrompt", "_PromptOptions"),
    "WeightTransferConfig": ("vllm/config/weight_transfer.py", "WeightTransferConfig"),
    "WeightTransferInitRequest": ("vllm/distributed/weight_transfer/base.py", "WeightTransferInitRequest"),
    "WeightTransferUpdateRequest": ("vllm/distributed/weight_transfer/base.py", "WeightTransferUpdateRequest"),
}
"""Classes that the strategies construct, each with the classes that declare its fields and the file that contains them.
"""
SERVED = {
    "vllm/entrypoints/rl/online/api_router.py": [
        "/pause",
        "/resume",
        "/is_paused",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/weight_info",
    ],
    "vllm/entrypoints/serve/dev/server_info/api_router.py": ["/server_info"],
    "vllm/entrypoints/serve/instrumentator/health.py": ["/health"],
    "vllm/entrypoints/scale_out/token_in_token_out/api_router.py": ["/inference/v1/generate"],
}
"""Paths of vLLM's server that roll asks, by file."""
