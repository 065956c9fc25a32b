"""Parameter counts of models, and the estimate of memory, by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from roll.config.derived.model_shape import ModelShape, config_file, read_shape
from roll.config.derived.placement import place
from roll.config.plan.memory import compiles, estimate, head_tokens, layer_activations, moments
from roll.config.schema.model import ModelConfig
from roll.config.schema.roles import ActorInferConfig, ActorTrainConfig, CriticConfig, ReferenceConfig
from roll.system.sizes import GIB

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
NAME = {"strategy_name": "deepspeed_train"}
PUBLISHED_QWEN_7B = 7_615_616_512
PUBLISHED_LLAMA_8B = 8_030_261_248


@pytest.fixture
def shape(tmp_path: Path) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    found = read_shape(tmp_path / "config.json")
    assert found
    return found


def trainer(stage: int, ranks: int, **keys: object) -> ActorTrainConfig:
    zero = {"stage": stage} | {key: value for key, value in keys.items() if key.startswith(("offload", "zero_"))}
    settings = {"zero_optimization": zero, "tensor_parallel": keys.pop("tensor_parallel", None)}
    settings |= {"expert_parallel": keys.pop("expert_parallel", None)}
    return ActorTrainConfig.model_validate(
        {
            "model_args": {key: value for key, value in keys.items() if not key.startswith(("offload", "zero_"))},
            "data_args": {"file_name": "x", "prompt": "p"},
            "strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": settings},
            "device_mapping": tuple(range(ranks)),
        }
    )


def states(role: ActorTrainConfig, shape: ModelShape) -> dict[str, int]:
    memory = estimate(place("actor_train", role, 6144), role, shape, 6144)
    return {kind: size for kind, size in memory.device.items() if kind in ("weights", "gradients", "optimizer")}


def test_parameters_are_those_published(shape: ModelShape, tmp_path: Path) -> None:
    assert shape.parameters == PUBLISHED_QWEN_7B
    llama = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(llama))
    found = read_shape(tmp_path / "config.json")
    assert found
    assert found.parameters == PUBLISHED_LLAMA_8B


def test_adapter_parameters_by_hand(shape: ModelShape) -> None:
    # Input plus output sizes: 3584 + 3584 for q and o, 3584 + 512 for k and v. Rank 32, 28 layers.
    assert shape.adapter_parameters("q_proj,k_proj,v_proj,o_proj", 32) == 28 * 32 * (2 * 7168 + 2 * 4096)
    assert shape.adapter_parameters("all-linear", 8) == 28 * 8 * (2 * 7168 + 2 * 4096 + 3 * (3584 + 18944))


def test_attention_of_a_long_sequence_by_hand(shape: ModelShape) -> None:
    # Per pair of tokens and layer: 2 products (scores, values) of 28 heads x 128, with 2 operations each. Half of the
    # pairs are masked.
    pair, token = 28 * 2 * 2 * 28 * 128 / 2, 2 * PUBLISHED_QWEN_7B
    assert shape.attention_cost == pytest.approx(pair / token)


def test_zero_stages_share_out_what_they_say(shape: ModelShape) -> None:
    full = PUBLISHED_QWEN_7B
    assert states(trainer(0, 8), shape) == {"weights": 2 * full, "gradients": 2 * full, "optimizer": 12 * full}
    assert states(trainer(1, 8), shape) == {"weights": 2 * full, "gradients": 2 * full, "optimizer": 12 * full // 8}
    assert states(trainer(2, 8), shape) == {
        "weights": 2 * full,
        "gradients": 2 * full // 8,
        "optimizer": 12 * full // 8,
    }
    assert states(trainer(3, 8), shape) == {
        "weights": 2 * full // 8,
        "gradients": 2 * full // 8,
        "optimizer": 12 * full // 8,
    }
    assert states(trainer(0, 1, dtype="fp32"), shape) == {
        "weights": 4 * full,
        "gradients": 4 * full,
        "optimizer": 8 * full,
    }


def test_lora_trains_only_its_adapters(shape: ModelShape) -> None:
    adapters = shape.adapter_parameters("all-linear", 8)
    held = states(trainer(3, 4, lora_target="all-linear", lora_rank=8), shape)
    assert held["optimizer"] == 12 * adapters // 4
    assert held["gradients"] == 2 * adapters // 4
    assert held["weights"] == 2 * (PUBLISHED_QWEN_7B + adapters) // 4


def test_lora_variants_have_norms_and_first_factors(shape: ModelShape) -> None:
    adapters = shape.adapter_parameters("q_proj,v_proj", 8)
    norms = 28 * (3584 + 512)

    def kinds(stage: int, **more: object) -> Mapping[str, int]:
        role = trainer(stage, 4, lora_target="q_proj,v_proj", lora_rank=8, **more)
        return estimate(place("actor_train", role, 6144), role, shape, 6144).device

    dora = states(trainer(2, 4, lora_target="q_proj,v_proj", lora_rank=8, use_dora=True), shape)
    assert dora["optimizer"] == 12 * (adapters + norms) // 4
    assert dora["weights"] == 2 * (PUBLISHED_QWEN_7B + adapters + norms)
    outputs, squares = 6144 * 2 * (3584 + 512), 2 * 3584**2  # of one recomputed layer
    assert kinds(2, use_dora=True)["activations"] - kinds(2)["activations"] == 2 * (outputs + squares + 2 * 3584 * 3584)
    plain = trainer(3, 4, lora_target="q_proj,v_proj", lora_rank=8)
    pissa = trainer(3, 4, lora_target="q_proj,v_proj", lora_rank=8, init_lora_weights="pissa")
    assert pissa.model_args.sent_rank == 16
    with_buffers, without = (
        estimate(place("actor_train", role, 6144), role, shape, 6144).device["buffers"] for role in (pissa, plain)
    )
    assert with_buffers - without == 2 * adapters


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4.5), ("nf4_double", 4 + 0.127)])
def test_quantized_base_has_four_bits_and_scales(shape: ModelShape, kind: str, bits: float) -> None:
    adapters, linear = shape.adapter_parameters("all-linear", 8), 28 * (3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944)
    role = trainer(2, 4, lora_target="all-linear", lora_rank=8, quantized_base=kind)
    held = states(role, shape)
    others = PUBLISHED_QWEN_7B - linear + adapters
    assert held["weights"] == pytest.approx(2 * others + linear * bits / 8, rel=1e-4)
    assert held["optimizer"] == 12 * adapters // 4
    plain = trainer(2, 4, lora_target="all-linear", lora_rank=8)
    more = [estimate(place("actor_train", each, 6144), each, shape, 6144).device["buffers"] for each in (role, plain)]
    assert more[0] - more[1] == 2 * 3584 * 18944  # the largest matrix, in bf16


def test_optimizers_have_their_own_moments(shape: ModelShape) -> None:
    ends = 2 * 152064 * 3584
    assert moments("muon", shape) * PUBLISHED_QWEN_7B == pytest.approx(4 * (PUBLISHED_QWEN_7B + ends))
    assert [moments(name, None) for name in ("adamw", "muon", "lion", "adagrad", "adamw_8bit")] == [8, 4, 4, 4, 2]


@pytest.mark.parametrize(
    ("stage", "device", "left", "on_host"),
    # Bytes per parameter: master weights and two moments 12, accumulated gradients 2, gradients of the update 4, and
    # below stage 3 the updated weights 2. Measured with DeepSpeed 0.19.8 in one process: 18 bytes per parameter on
    # stage 3 and 20 on stage 2.
    [
        (3, "cpu", {"weights"}, 12 + 2 + 4),
        (2, "cpu", {"weights"}, 12 + 2 + 4 + 2),
        (1, "cpu", {"weights", "gradients"}, 20),
        (3, "nvme", {"weights"}, 2),
    ],
)
def test_offload_moves_states_and_gradients_to_the_host(
    shape: ModelShape, stage: int, device: str, left: set[str], on_host: int
) -> None:
    offload = {"device": device} | ({"nvme_path": "/nvme"} if device == "nvme" else {})
    role = trainer(stage, 4, offload_optimizer=offload)
    memory = estimate(place("actor_train", role, 6144), role, shape, 6144)
    assert memory.device.keys() & {"weights", "gradients", "optimizer"} == left
    assert memory.host == on_host * PUBLISHED_QWEN_7B // 4


def test_sharded_fp32_keeps_a_copy_of_weights(shape: ModelShape) -> None:
    # Measured with DeepSpeed 0.19.8 in one process: 20 bytes per parameter on stage 3, 12 of them master weights and
    # moments.
    assert states(trainer(3, 1, dtype="fp32"), shape) == {
        "weights": 4 * PUBLISHED_QWEN_7B,
        "gradients": 4 * PUBLISHED_QWEN_7B,
        "optimizer": 12 * PUBLISHED_QWEN_7B,
    }


def test_the_second_copy_of_zeropp_counts(shape: ModelShape) -> None:
    # Each of the 16 ranks has 1/16 of the weights, and 1/8 of the second copy, which the 8 ranks of a host share.
    assert states(trainer(3, 16, zero_hpz_partition_size=8), shape)["weights"] == 2 * (
        PUBLISHED_QWEN_7B // 16 + PUBLISHED_QWEN_7B // 8
    )


def test_checkpointing_holds_fewer_activations(shape: ModelShape) -> None:
    kept, recomputed = (trainer(3, 8, gradient_checkpointing=wish) for wish in ("none", "all"))
    sizes = [
        estimate(place("actor_train", role, 6144), role, shape, 6144).device["activations"]
        for role in (kept, recomputed)
    ]
    assert sizes[0] > 9 * sizes[1]


def test_recomputed_attention_keeps_only_its_input(shape: ModelShape) -> None:
    role = trainer(3, 8, gradient_checkpointing="attention", compile_layers=False)
    device = estimate(place("actor_train", role, 6144), role, shape, 6144).device
    hidden, inner, layers, mixer = 3584, 18944, 28, 2 * 28 * 128 + 2 * 4 * 128
    assert device["activations"] == 2 * 6144 * (layers * (5 * hidden + 4 * inner) + mixer)


@pytest.mark.parametrize(
    ("given", "on_gpu", "compiled"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"engine_kernels": True}, True, False),
        ({"liger": True}, True, False),
        ({"dropout": True}, True, False),
        ({"lora_dropout": 0.1}, True, False),
        ({"compile_layers": True, "liger": True}, True, True),
        ({"compile_layers": False}, True, False),
    ],
)
def test_which_layers_are_compiled(given: dict[str, object], on_gpu: bool, compiled: bool) -> None:
    assert compiles(ModelConfig.model_validate(given), on_gpu) is compiled


def test_an_engine_and_a_reference(shape: ModelShape) -> None:
    settings = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.6}
    infer = ActorInferConfig.model_validate(
        {"strategy_args": {"strategy_name": "vllm", "strategy_config": settings}, "device_mapping": (0, 1, 2, 3)}
    )
    plan = place("actor_infer", infer, 6144)
    assert plan.devices == ((0, 1), (2, 3))
    assert (plan.ranks, plan.tensor_parallel, plan.on_cpu) == (2, 2, False)
    memory = estimate(plan, infer, shape, 6144)
    # Each rank has 2 of the 4 key-value heads of size 128: keys and values of 28 layers and 6144 tokens in bf16.
    assert memory.device == {"weights": PUBLISHED_QWEN_7B, "kv_cache": 6144 * 28 * 2 * 2 * 128 * 2}
    assert shape.kv_bytes(2, 8) == 28 * 2 * 1 * 128 * 2, "with fewer heads than ranks, heads are replicated"
    assert memory.reserved_fraction == 0.6
    reference = ReferenceConfig.model_validate(
        {"strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": (0, 1)}
    )
    assert (
        estimate(place("reference", reference, 6144), reference, shape, 6144).device["weights"] == 2 * PUBLISHED_QWEN_7B
    )
    assert 14 < 2 * PUBLISHED_QWEN_7B / GIB < 15


def test_a_quantised_engine_keeps_a_byte_a_weight(shape: ModelShape) -> None:
    block = {"strategy_name": "vllm", "strategy_config": {"quantization": "fp8"}}
    infer = ActorInferConfig.model_validate({"strategy_args": block, "device_mapping": (0,)})
    hidden, inner, vocabulary, layers = 3584, 18944, 152064, 28
    linear = layers * (2 * hidden * hidden + 2 * hidden * 512 + 3 * hidden * inner)
    rest = 2 * vocabulary * hidden + layers * (hidden + 2 * 512 + 2 * hidden) + hidden
    memory = estimate(place("actor_infer", infer, 6144), infer, shape, 6144)
    assert memory.device["weights"] == linear + 2 * rest


def test_every_kind_of_72b_by_hand() -> None:
    """The figures of Qwen2.5-72B in docs/clusters.md: 32 ranks of ZeRO-3, sequences of 6144 tokens, all layers
    recomputed.
    """
    file = config_file("Qwen/Qwen2.5-72B-Instruct")
    shape = read_shape(file) if file else None
    assert shape and shape.parameters == 72_706_203_648
    role = trainer(3, 32, gradient_checkpointing="all", compile_layers=True)
    device = estimate(place("actor_train", role, 6144), role, shape, 6144).device
    tokens, hidden, inner, vocabulary, head = 6144, 8192, 29568, 152064, 152064 * 8192
    assert device == {
        "weights": 2 * 72_706_203_648 // 32,
        "gradients": 2 * 72_706_203_648 // 32,
        "optimizer": 12 * 72_706_203_648 // 32,
        # The head is larger than the 1e9 parameters that may stay gathered by default. A bucket holds 5e8 gradients.
        "buffers": 2 * (head + 500_000_000),
        # Each of 80 layers keeps its input. The layer that is being recomputed is compiled. It keeps two tensors of
        # hidden size; q and the attention's output (64 heads each); keys and values (8 heads each); and two tensors of
        # the MLP's inner size.
        "activations": 80 * 2 * tokens * hidden + 2 * tokens * (2 * hidden + 2 * 64 * 128 + 2 * 8 * 128 + 2 * inner),
        # Logits of 3456 tokens in fp32 and their gradient in bf16; the head's gradient in fp32 and in bf16.
        "head": 6 * 3456 * vocabulary + 6 * head,
    }


def test_adapters_copy_their_inputs_in_fp32(shape: ModelShape) -> None:
    tokens = 6144
    layers, hidden, inner = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
    keys = {"lora_target": "all-linear", "lora_rank": 8, "gradient_checkpointing": "all", "compile_layers": True}
    plain, pissa = (trainer(2, 1, **keys, **more) for more in ({}, {"init_lora_weights": "pissa"}))
    found = [estimate(place("actor_train", role, tokens), role, shape, tokens).device for role in (plain, pissa)]
    layer = layer_activations(shape, tokens, 2, compiled=True)
    # The inputs of q, k and v; of o; of gate and up; and of down, whose gradient exists in fp32 and in bf16.
    assert shape.num_attention_heads * shape.head_dim == hidden
    recomputed = layer + tokens * (4 * (3 * hidden + inner) + 6 * inner)
    assert found[0]["activations"] == layers * 2 * tokens * hidden + recomputed
    assert found[1]["activations"] == found[0]["activations"] + 4 * tokens * inner
    # The logits and their gradient are gone when a layer is recomputed and its gradients fill a bucket.
    logits = 6 * min(head_tokens(shape.vocab_size), tokens) * shape.vocab_size
    assert found[0]["head"] == max(0, logits - recomputed - 2 * 500_000_000)
    attention, whole = (trainer(2, 1, **(keys | {"gradient_checkpointing": how})) for how in ("attention", "none"))
    for role in (attention, whole):
        assert estimate(place("actor_train", role, tokens), role, shape, tokens).device["head"] == logits


def test_buffers_are_those_of_deepspeeds_configuration(shape: ModelShape) -> None:
    def buffers(stage: int, ranks: int, **zero: object) -> int:
        settings = {"zero_optimization": {"stage": stage, **zero}}
        role = trainer(stage, ranks).model_copy(
            update={
                "strategy_args": trainer(stage, ranks).strategy_args.model_validate(
                    {"strategy_config": settings, **NAME}
                )
            }
        )
        return estimate(place("actor_train", role, 6144), role, shape, 6144).device["buffers"]

    assert buffers(0, 8) == 0
    assert buffers(2, 8) == 2 * 500_000_000
    assert buffers(2, 8, overlap_comm=True, reduce_bucket_size=1000) == 2 * 2 * 1000
    assert buffers(2, 8, overlap_comm="auto", reduce_bucket_size="auto", contiguous_gradients="auto") == 2 * 500_000_000
    assert buffers(3, 1, reduce_bucket_size=1000) == 2 * 1000, "a single rank gathers nothing"
    assert buffers(3, 8, stage3_max_live_parameters=2 * 10**9) == 2 * (2 * 10**9 + 500_000_000)
    assert buffers(3, 8, stage3_max_live_parameters=1) == 2 * (152064 * 3584 + 500_000_000), (
        "the largest parameter is always gathered"
    )


def test_a_model_of_another_kind_has_no_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 768}')
    assert read_shape(tmp_path / "config.json") is None
    assert config_file(str(tmp_path)) == tmp_path / "config.json"
    assert config_file("nobody/has-this-model") is None


@pytest.mark.parametrize(("variable", "below"), [("HF_HOME", "hub"), ("HF_HUB_CACHE", "")])
def test_hub_cache_follows_its_environment_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    file = tmp_path / below / "models--maker--model" / "snapshots" / "abc" / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    assert config_file("maker/model") == file


def test_a_critic_holds_no_vocabulary_at_its_end(shape: ModelShape) -> None:
    """The head of Qwen2.5-7B has 152064 x 3584 of its 7.6 billion parameters; a critic has one row of 3584 instead."""
    assert shape.valuing_parameters == PUBLISHED_QWEN_7B - 152064 * 3584 + 3584
    keys = trainer(0, 1).model_dump(exclude={"data_args"})
    critic = CriticConfig.model_validate(keys)
    policy, value = (
        estimate(place("critic", role, 6144), role, shape, 6144).device for role in (trainer(0, 1), critic)
    )
    assert "head" in policy and "head" not in value
    assert value["weights"] == 2 * shape.valuing_parameters
    assert value["activations"] == policy["activations"]


def test_tensor_parallelism_divides_linear_layers_in_memory_estimate(shape: ModelShape) -> None:
    role = trainer(1, 8, dtype="bf16", tensor_parallel={"autotp_size": 4})
    whole = 2 * shape.vocab_size * shape.hidden_size + (2 * shape.num_hidden_layers + 1) * shape.hidden_size
    held = whole + (PUBLISHED_QWEN_7B - whole) // 4
    assert states(role, shape) == {"weights": 2 * held, "gradients": 2 * held, "optimizer": 12 * held // 2}


def test_a_rank_holds_its_part_of_the_experts(tmp_path: Path) -> None:
    mixture = QWEN_7B | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(mixture | {"moe_intermediate_size": 768}))
    shape = read_shape(tmp_path / "config.json")
    assert shape is not None
    assert shape.expert_parameters == 28 * 8 * 3 * 3584 * 768
    shared, other = {"autoep_size": 2}, shape.parameters - shape.expert_parameters
    here = other + shape.expert_parameters // 2
    assert states(trainer(1, 4, expert_parallel=shared), shape) == {
        "weights": 2 * here,
        "gradients": 2 * here,
        "optimizer": 12 * shape.parameters // 4,
    }
    assert states(trainer(3, 4, expert_parallel=shared), shape) == states(trainer(3, 4), shape)
    gathered = [
        estimate(place("actor_train", role, 6144), role, shape, 6144).device["buffers"]
        for role in (trainer(3, 4), trainer(3, 4, expert_parallel=shared))
    ]
    live = [min(10**9, numbers) for numbers in (shape.parameters, here)]
    assert [size - 10**9 for size in gathered] == [2 * numbers for numbers in live], "and a reduction bucket"
