"""Translates the backends of ROLL's files that roll does not have to those that it has.

megatron_train, fsdp2_train ──▶ deepspeed_train with ZeRO-3; context parallelism ──▶ sequence_parallel_size
megatron_infer, fsdp2_infer ──▶ hf_infer, or deepspeed_infer for a model that is split over GPUs
sglang                      ──▶ vllm
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from roll.config.derived.devices import parse_devices
from roll.config.roll_v2.translate import Translation
from roll.config.schema.faults import printable
from roll.config.schema.foreign_names import BACKEND_KEYS, MEGATRON_FUSIONS, ROLES
from roll.config.schema.foreign_names import STRATEGIES as FOREIGN

CONTEXT, ULYSSES = "context_parallel_size", "sequence_parallel_size"
SPLITS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
"""Keys of Megatron that split the weights of a replica over GPUs."""
SHARED = ("tensor_model_parallel_size", "pipeline_model_parallel_size", CONTEXT)
"""Keys of Megatron that divide the GPUs among fewer replicas. Experts are split among replicas."""
OFFLOADS = {"offload_policy": True, "optimizer_cpu_offload": False}
"""Keys of FSDP2 and Megatron that keep states in host memory, and whether these include the parameters."""
FUSIONS = "additional_configs"
HOST = {"device": "cpu", "pin_memory": True}
ENGINE = {"mem_fraction_static": "gpu_memory_utilization", "disable_cuda_graph": "enforce_eager"}
"""SGLang's keys with other names in vLLM."""
OF_VLLM = ("load_format", "tensor_parallel_size", "max_model_len", *ENGINE.values())
BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
NUMBERS = {BATCH: 8, ACCUMULATION: 1}
"""ROLL's defaults of the batch sizes."""


def settle_backends(done: Translation) -> None:
    """Translate the strategies of a file of ROLL in place, with a warning for each, so that updates keep their size."""
    for name in ROLES:
        role = done.values.get(name)
        strategy = role.get("strategy_args") if isinstance(role, dict) else None
        if not isinstance(role, dict) or not isinstance(strategy, dict):
            continue
        chosen, block = strategy.get("strategy_name"), strategy.get("strategy_config")
        if isinstance(chosen, str) and chosen in FOREIGN and isinstance(block, dict | None):
            _Backend(done, name, role, chosen, block or {}).settle()
        elif chosen in ("deepspeed_train", "deepspeed_infer"):
            _precision(done, name, role, block)
        if isinstance(chosen, str) and chosen.endswith("_train"):
            _warm_up(done, name, role, chosen)


def _precision(done: Translation, name: str, role: dict[str, Any], block: Any) -> None:
    """Let DeepSpeed's block decide the precision of a role, as it does in ROLL, whose presets all enable bf16."""
    model, enabled = role.get("model_args"), block.get("bf16") if isinstance(block, dict) else None
    if not isinstance(model, dict) or not isinstance(enabled, dict) or enabled.get("enabled") is not True:
        return
    if (given := model.get("dtype")) not in (None, "bf16"):
        model["dtype"] = "bf16"
        said = f"{printable(given)} is read as bf16, because strategy_config.bf16.enabled decides in ROLL"
        done.warn(f"{name}.model_args.dtype: {said}; use that instead, or a strategy_config without bf16")


def _warm_up(done: Translation, name: str, role: dict[str, Any], chosen: str) -> None:
    """Read a constant learning rate with a warm-up as ROLL does: only Megatron warms up to it."""
    arguments = role.get("training_args")
    if not isinstance(arguments, dict) or arguments.get("lr_scheduler_type") != "constant":
        return
    given = [key for key in ("warmup_steps", "warmup_ratio") if arguments.get(key)]
    if not given:
        return
    where = f"{name}.training_args"
    if chosen == "megatron_train":
        arguments["lr_scheduler_type"] = "constant_with_warmup"
        said = "'constant' is read as constant_with_warmup, as in ROLL with Megatron; use that instead"
        done.warn(f"{where}.lr_scheduler_type: {said}")
    else:
        for key in given:
            value = arguments.pop(key)
            said = "in ROLL the schedule constant has no warm-up with this strategy; use constant_with_warmup"
            done.warn(f"{where}.{key}: {printable(value)} is ignored; {said}")


@dataclass(frozen=True)
class _Backend:
    """The strategy of one role."""

    done: Translation
    name: str
    role: dict[str, Any]
    chosen: str
    """ROLL's name of the strategy."""
    given: dict[str, Any]
    """ROLL's `strategy_config`."""

    def settle(self) -> None:
        """Translate the strategy in place. A key that may change the result is a fault."""
        known = BACKEND_KEYS[self.chosen.partition("_")[0]]
        fusions = self.given.get(FUSIONS)
        unknown = {key: value for key, value in self.given.items() if key not in (*known, *OF_VLLM, ULYSSES)}
        if isinstance(fusions, dict) and set(fusions) <= set(MEGATRON_FUSIONS):
            unknown.pop(FUSIONS, None)
        for key, value in unknown.items():
            problem = f"{printable(value)} is a setting of {FOREIGN[self.chosen][0]}, and may change the result"
            place = f"{self.name}.strategy_args.strategy_config.{key}"
            self.done.fault(place, problem, "remove it; it has no counterpart here", "not_supported")
        model = self.role.get("model_args")
        if self.given.get("bf16") is True and isinstance(model, dict) and model.get("dtype") == "fp32":
            model["dtype"] = "bf16"
            self.done.warn(
                f"{self.name}.model_args.dtype: 'fp32' is read as bf16, because strategy_config.bf16 is true"
            )
        if self.chosen == "sglang":
            self._engine()
        elif self.chosen.endswith("_train"):
            self._trainer()
        else:
            self._scorer()

    def _set(self, strategy: str, block: dict[str, Any] | None, said: str) -> None:
        self.role["strategy_args"] = {"strategy_name": strategy} | ({} if block is None else {"strategy_config": block})
        read = (*SPLITS, CONTEXT, ULYSSES, *OFFLOADS, *OF_VLLM, *ENGINE)
        left = [key for key in self.given if key not in read]
        ignored = f"; ignored, because they do not change the result: {', '.join(left)}" if left else ""
        self.done.warn(
            f"{self.name}.strategy_args: {self.chosen} is read as {strategy}{said}{ignored}; set it explicitly"
        )

    def _trainer(self) -> None:
        key = CONTEXT if CONTEXT in self.given else ULYSSES
        given, block = self._size(key), self._zero()
        split = 1 if self.done.sees else given
        if split > 1:
            block[ULYSSES] = split
        said = f" with ZeRO-3, which shards the states over all GPUs{self._replaced()}"
        if given > 1:
            read = f"is {ULYSSES}={split}" if split > 1 else "is left out, because pictures are not split over ranks"
            said += f"; {key if key == CONTEXT else 'ulysses_size'} {given} {read}"
        if self.chosen == "megatron_train" and self._dtype() == "bf16":
            block["data_types"] = {"grad_accum_dtype": "fp32"}
            said += "; gradients add up in fp32, as with Megatron"
        elif self.chosen == "fsdp2_train" and (sums := str(self.given.get("reduce_dtype", "fp32"))) != self._dtype():
            block["communication_data_type"] = sums
            said += f"; gradients are reduced in {sums}"
        self._set("deepspeed_train", block, said)
        if self.chosen == "megatron_train":
            self._same_update(prod(self._size(key) for key in SHARED), split)
            self._routers()

    def _scorer(self) -> None:
        if self.chosen == "megatron_infer" and all(self._size(key) == 1 for key in SPLITS):
            self._set("hf_infer", None, ", which keeps the whole model on each GPU")
        else:
            said = f" with ZeRO-3, which shards the weights over all GPUs{self._replaced()}"
            self._set("deepspeed_infer", self._zero(), said)

    def _zero(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": 3}
        for key, is_whole in OFFLOADS.items():
            if self.given.get(key):
                kinds = ["offload_optimizer"] * self.chosen.endswith("_train") + ["offload_param"] * is_whole
                zero |= {kind: dict(HOST) for kind in kinds}
                self.done.warn(f"{self.name}.strategy_args.strategy_config.{key}: read as {' and '.join(kinds)}")
        return {"zero_optimization": zero}

    def _dtype(self) -> str:
        model = self.role.get("model_args")
        return str(model.get("dtype") or "bf16") if isinstance(model, dict) else "bf16"

    def _routers(self) -> None:
        """Say that Megatron adds the routers' loss of the model's config.json, if the model has experts."""
        arguments = self.role.get("training_args")
        is_set = isinstance(arguments, dict) and "router_aux_loss_coef" in arguments
        if not is_set and (self._size(SPLITS[2]) > 1 or any(key.startswith("moe_") for key in self.given)):
            said = "Megatron adds the load-balancing loss with router_aux_loss_coef of the model's config.json"
            place = f"{self.name}.training_args.router_aux_loss_coef"
            self.done.warn(f"{place}: missing, so routers have no such loss here; {said}; set that number")
        model = self.role.get("model_args")
        if self._size(SPLITS[2]) > 1 and isinstance(model, dict) and model.get("lora_target") == "all-linear":
            sync = self.done.values.setdefault("weight_sync", {})
            if isinstance(sync, dict) and "lora" not in sync:
                sync["lora"] = "merged"
                self.done.warn("weight_sync.lora: missing, so it is merged: vLLM takes no adapter on fused experts")

    def _engine(self) -> None:
        names = {**{key: key for key in OF_VLLM}, **ENGINE}
        block = {names[key]: value for key, value in self.given.items() if key in names}
        said = ", ".join(f"{key} as {new}" for key, new in ENGINE.items() if key in self.given)
        self._set("vllm", block, f", {said}" if said else "")

    def _replaced(self) -> str:
        sizes = [f"{key} {self._size(key)}" for key in SPLITS if self._size(key) > 1]
        return f" in place of {', '.join(sizes)}" if sizes else ""

    def _size(self, key: str) -> int:
        value = self.given.get(key, 1)
        return value if isinstance(value, int) and value > 0 else 1

    def _same_update(self, theirs: int, ours: int) -> None:
        """Keep the sequences of an update: Megatron has one replica for `theirs` GPUs, DeepSpeed one for `ours`.

        Fewer ranks than one of Megatron's replicas, which ROLL refuses, stand for one.
        """
        ranks, arguments = _ranks(self.role), self.role.setdefault("training_args", {})
        if theirs == ours or not ranks or not isinstance(arguments, dict) or "updates_per_step" in self.done.values:
            return
        numbers = [arguments.get(key, default) for key, default in NUMBERS.items()]
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            return
        whole, replicas = prod(numbers) * max(1, ranks // theirs), max(1, ranks // ours)
        where = f"{self.name}.training_args"
        if whole % replicas:
            text = f"an update has {whole} sequences in ROLL, but {prod(numbers) * replicas} here"
            self.done.warn(
                f"{where}.{ACCUMULATION}: {text}, because {theirs} GPUs share one replica there, {ours} here"
            )
            return
        per_replica = whole // replicas
        batch = gcd(numbers[0], per_replica)
        settled = {BATCH: batch, ACCUMULATION: per_replica // batch}
        changed = [key for key, old in zip(NUMBERS, numbers, strict=True) if settled[key] != old]
        arguments |= settled
        for key in changed:
            old = numbers[list(NUMBERS).index(key)]
            text = f"{old} is read as {settled[key]}, so that an update still has {whole} sequences"
            self.done.warn(f"{where}.{key}: {text}, because {theirs} GPUs share one replica in ROLL, {ours} here")


def whole_updates(done: Translation) -> None:
    """Make one update of a step with fewer episodes than an update has: ROLL copies episodes to fill it."""
    role, values = done.values.get("actor_train"), done.values
    arguments = role.get("training_args") if isinstance(role, dict) else None
    groups, size = (values.get(key) for key in ("rollout_batch_size", "num_return_sequences_in_group"))
    if not isinstance(role, dict) or not isinstance(arguments, dict) or ACCUMULATION not in arguments:
        return
    batch, steps = (arguments.get(key, default) for key, default in NUMBERS.items())
    given = (groups, size, batch, steps, _replicas(role))
    numbers = [number for number in given if isinstance(number, int) and number > 0]
    if len(numbers) < len(given):
        return
    groups, size, batch, steps, replicas = numbers
    episodes, update = groups * size, batch * steps * replicas
    if episodes < update and episodes % (batch * replicas) == 0:
        arguments[ACCUMULATION] = episodes // (batch * replicas)
        text = f"{steps} makes updates of {update}, but a step has {episodes} episodes, which ROLL copies to fill one"
        said = f"it is read as {arguments[ACCUMULATION]}, one update of each episode once"
        done.warn(f"actor_train.training_args.{ACCUMULATION}: {text}; {said}")


def _replicas(role: Mapping[str, Any]) -> int:
    """Return the number of replicas of a role that DeepSpeed trains; 0 if its devices cannot be read."""
    strategy = role.get("strategy_args")
    block = strategy.get("strategy_config") if isinstance(strategy, dict) else None
    split = block.get(ULYSSES, 1) if isinstance(block, dict) else 1
    return _ranks(role) // split if isinstance(split, int) and split > 0 else 0


def _ranks(role: Mapping[str, Any]) -> int:
    """Return the number of ranks of a role with one device per rank; 0 if it cannot be read."""
    processes = role.get("world_size", 1)
    on_cpu = processes if role.get("device_mapping") is None and isinstance(processes, int) else 0
    return count_devices(role.get("device_mapping")) or on_cpu


def count_devices(devices: Any) -> int:
    """Return the number of devices of a `device_mapping`; 0 without one, or with one that cannot be read."""
    try:
        return len(parse_devices(devices)) if isinstance(devices, str) else len(devices or ())
    except (ValueError, TypeError):
        return 0
