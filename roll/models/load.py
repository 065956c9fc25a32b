"""Load a causal language model so that it scores packed sequences, with or without a LoRA adapter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from roll.config.schema_model import ModelArgs
from roll.errors import DataError, Fault
from roll.models import attention
from roll.models.head import LogProbHead
from roll.models.kernels import apply_liger, register_flash

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class PackedInputs:
    """One micro-batch on the device of the model that reads it."""

    token_ids: Tensor
    """[T] int64"""
    position_ids: Tensor
    """[T] int64, counted from 0 in each sequence."""
    cu_seq_lens: Tensor
    """[N + 1] int32"""
    max_length: int
    """Tokens of the longest sequence."""
    scored: Tensor
    """[S] int64: positions t > 0 of the tokens whose log-probs are wanted; each is predicted at t - 1."""


class PackedPolicy(nn.Module):
    """A causal model whose forward pass yields log-probs and entropies of chosen tokens, not logits."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        self.model = model

    @property
    def causal(self) -> PreTrainedModel:
        """The transformers model, beneath the adapter if there is one."""
        causal = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        assert isinstance(causal, PreTrainedModel)
        return causal

    def forward(self, inputs: PackedInputs, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """fp32 [S] log-probs and fp32 [S] entropies of the tokens at `inputs.scored`."""
        hidden = self.causal.base_model(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.position_ids[None],
            use_cache=False,
            cu_seq_lens_q=inputs.cu_seq_lens,
            cu_seq_lens_k=inputs.cu_seq_lens,
            max_length_q=inputs.max_length,
            max_length_k=inputs.max_length,
        ).last_hidden_state[0]
        head = self.causal.get_output_embeddings()
        assert isinstance(head, LogProbHead)
        # index_select: its backward pass adds rows, that of indexing sorts them first.
        return head(hidden.index_select(0, inputs.scored - 1), inputs.token_ids[inputs.scored], temperature)


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder or Hub name.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError([unreadable(path, "tokenizer", error)]) from error


def check_readable(path: str) -> None:
    """Read the headers of a local model's weights, so that a broken file is known before anything starts.

    Raises:
        DataError: a file is missing or cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        if not files and not list(folder.glob("*.bin")):
            raise FileNotFoundError("it holds no weights (*.safetensors)")
        for file in files:
            with safe_open(file, "pt"):
                pass
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DataError([unreadable(path, "model", error)]) from error


def load_causal_model(path: str, model_args: ModelArgs, packed: bool = True) -> PreTrainedModel:
    """The model in the precision asked for; with `packed`, ready for `PackedPolicy`.

    Raises:
        DataError: the weights or their configuration cannot be read.
        ConfigError: a kernel is asked for that this machine has not.
    """
    implementation = "sdpa"
    if packed:
        implementation = register_flash() if model_args.attn_implementation == "fa2" else attention.register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=DTYPES[model_args.dtype],
            attn_implementation=implementation,
            trust_remote_code=model_args.trust_remote_code,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError([unreadable(path, "model", error)]) from error
    if model_args.liger:
        apply_liger(model)
    if packed:
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        model.set_output_embeddings(LogProbHead(head))
    return model


def add_lora(model: PreTrainedModel, model_args: ModelArgs, seed: int) -> PeftModel:
    """Wrap the model in a PEFT LoRA adapter, initialised alike on every rank."""
    assert model_args.lora_target is not None
    targets = [name.strip() for name in model_args.lora_target.split(",")]
    set_seed(seed)
    return get_peft_model(
        model,
        LoraConfig(
            r=model_args.lora_rank,
            lora_alpha=model_args.lora_alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=model_args.lora_dropout,
            target_modules="all-linear" if targets == ["all-linear"] else targets,
            task_type="CAUSAL_LM",
        ),
    )


def unreadable(path: str, what: str, error: Exception) -> Fault:
    """The fault of a model or tokenizer that cannot be loaded."""
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    where = "" if Path(path).exists() else " (there is no such folder here, and it could not be had from the Hub)"
    problem = f"the {what} '{path}' cannot be read{where}: {first_line}"
    return Fault("pretrain", problem, "give the folder or Hub name of a causal language model")
