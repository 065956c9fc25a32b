"""Writes the model card of an export: `README.md`, with the metadata that the Hugging Face Hub reads at its top.

Only facts of the run folder are in it. What the Hub cannot know stays open: the license is `unknown`, and a base model
that is a folder of this machine is named without its path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from roll.config.derived.batch import learner
from roll.config.derived.domains import environment_of, named_rewards
from roll.config.derived.model_shape import config_file, sees_pictures
from roll.config.schema.model import ModelConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.tracking.history import read_starts
from roll.tracking.intervals import CONFIDENCE, wilson
from roll.tracking.jsonl import METRICS_FILE, VALIDATION_SAMPLES_FILE, each_record

CARD = "README.md"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files that only the export of a model that sees pictures has."""
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""By `model_args.dtype`, torch's name."""
KEYS = (
    "pipeline", "adv_estimator", "policy_loss", "preference_loss", "beta", "rollout_batch_size",
    "num_return_sequences_in_group", "prompt_length", "response_length", "sequence_length", "max_length", "seed",
)  # fmt: skip
"""Keys of the root that a card shows."""
OF_PARTS = ("prompt_length", "response_length")
"""Keys of the root that `max_length` replaces."""
OF_ADAPTERS = ("lora_rank", "lora_alpha", "use_rslora", "use_dora", "init_lora_weights", "quantized_base")
"""Keys of a role that only an adapter reads."""
ROLE_KEYS = (
    (
        "model_args",
        (
            "dtype", "lora_target", "lora_rank", "lora_alpha", "use_rslora", "use_dora", "init_lora_weights",
            "quantized_base",
        ),
    ),
    ("training_args", ("learning_rate", "lr_scheduler_type")),
)  # fmt: skip
"""Keys of the trained role that a card shows."""
SCORING = (
    'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_HUB_NAME")',
    'conversation = [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
    'tokens = tokenizer.apply_chat_template(conversation, return_tensors="pt", return_dict=True)',
    "score = model(**tokens).logits[0, 0]",
)
"""Lines that score a conversation with a reward model."""
SHARES = ("pass@", "maj@")
"""Beginnings of the names of metrics that are shares of the prompts."""
SCORES = (*SHARES, "avg@", "accuracy", "loss", "perplexity", "reward_margin", "divergence")


def model_card(config: Config, run: Path, export: Path, step: int) -> str:
    """Return the card of the model that a run exported after a step.

    Args:
        run: the run folder, of which the metrics and the starts are read, if there are any.
        export: the folder of the model, of which the configuration is read.
    """
    _, role = learner(config)
    base = role.model_args.model_name_or_path or config.pretrain
    is_adapter = (export / "adapter_config.json").is_file()
    package, kind = model_class(export)
    kind_of_model = "adapter" if is_adapter else "reward model" if "Sequence" in kind else "model"
    known = None if _is_folder(base, run) else base
    metadata: dict[str, Any] = {
        **({"base_model": known, "base_model_relation": "adapter" if is_adapter else "finetune"} if known else {}),
        "library_name": package,
        "license": "unknown",
        "pipeline_tag": "text-classification" if "Sequence" in kind else "text-generation",
        "tags": ["roll", config.pipeline],
    }
    name = f"`{known}`" if known else "a model in a local folder"
    *imports, call = loading_call(export, "FOLDER_OR_HUB_NAME", role.model_args).split("; ")
    is_scored_so = "Sequence" in kind and role.data_args is not None and role.data_args.template == "native"
    if is_scored_so:
        imports.append("from transformers import AutoTokenizer")
    scoring = SCORING if is_scored_so else ()
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {config.exp_name}\n",
        f"This {kind_of_model} was trained from {name} in {step} steps of `pipeline: {config.pipeline}` of roll.\n",
        "\n".join(["```python", *imports, "", f"model = {call}", *scoring, "```", ""]),
        *_validation(run, step),
        "## Training\n",
        _table(("key", "value"), settings(config)),
        *_versions(run),
        "## License\n",
        "Unknown to roll. Those of the base model and of the data apply; set `license` above before you publish.\n",
    ]
    return "\n".join(parts)


def loading_call(export: Path, name: str, trained: ModelConfig) -> str:
    """Return Python code that loads an export: imports and a call, separated by semicolons.

    Args:
        name: The folder or Hub name in the call.
        trained: The model in the training. An adapter on a quantised base needs the same base, rounded from the same
            precision.
    """
    package, kind = model_class(export)
    needed, imports = [f'"{name}"'], f"from {package} import {kind}"
    if "auto_map" in _values_in(export / "config.json"):
        needed.append("trust_remote_code=True")
    if trained.quantized_base is not None and (export / "adapter_config.json").is_file():
        double = ", bnb_4bit_use_double_quant=True" if trained.quantized_base == "nf4_double" else ""
        needed.append(f'dtype="{PRECISIONS[trained.dtype]}"')
        needed.append(f'quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"{double})')
        imports += "; from transformers import BitsAndBytesConfig"
    return f"{imports}; {kind}.from_pretrained({', '.join(needed)})"


def model_class(export: Path) -> tuple[str, str]:
    """Return the package and the class that load an export: an adapter with its base, a reward model or a policy."""
    adapter = export / "adapter_config.json"
    is_adapter, configured = adapter.is_file(), export / "config.json"
    if is_adapter and (base := _values_in(adapter).get("base_model_name_or_path")):
        configured = config_file(base) or configured
    values = _values_in(configured)
    if not is_adapter and "ForSequenceClassification" in "".join(values.get("architectures") or []):
        return "transformers", "AutoModelForSequenceClassification"
    has_processor = any((export / name).is_file() for name in PROCESSORS)
    # Also with an adapter, which transformers puts on the base.
    if sees_pictures(values.get("model_type"), has_processor):
        return "transformers", "AutoModelForImageTextToText"
    return ("peft", "AutoPeftModelForCausalLM") if is_adapter else ("transformers", "AutoModelForCausalLM")


def _values_in(file: Path) -> dict[str, Any]:
    """Return the values in a JSON file; none if it does not exist."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def settings(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys that say how a model was trained, with their values."""
    unread = OF_PARTS if getattr(config, "max_length", None) is not None else ()
    for key in KEYS:
        if key not in unread and (value := getattr(config, key, None)) is not None:
            yield key, str(value)
    name, role = learner(config)
    unread = () if role.model_args.lora_target else OF_ADAPTERS
    for block, keys in ROLE_KEYS:
        for key in keys:
            if key not in unread and (value := getattr(getattr(role, block), key)) is not None:
                yield f"{name}.{block}.{key}", ", ".join(value) if isinstance(value, tuple) else str(value)
    if role.data_args is not None:
        files = role.data_args.file_name
        named = [files] if isinstance(files, str) else files
        yield f"{name}.data_args.file_name", ", ".join(Path(file).name if Path(file).suffix else file for file in named)
    if isinstance(config, RlvrConfig):
        yield from named_rewards(config.rewards).items()
        for domain, section in config.environments.items():
            yield f"environments.{domain}", environment_of(domain, section)


def fingerprint(export: Path) -> str:
    """Return a hash of an export's card; empty without one."""
    card = export / CARD
    return hashlib.sha256(card.read_bytes()).hexdigest() if card.is_file() else ""


def _is_folder(model: str, run: Path) -> bool:
    """Return whether a model is a folder, where a run started or here, and not a name on the Hub."""
    here = [Path.cwd(), *(Path(start.folder) for start in read_starts(run))]
    return model.count("/") > 1 or any((folder / model).exists() for folder in here)


def _validation(run: Path, step: int) -> Iterator[str]:
    found, at = _scores(run / METRICS_FILE, step)
    if not found:
        return
    prompts = _prompts(run / VALIDATION_SAMPLES_FILE, at)
    rows = []
    for (name, metric), value in found.items():
        size = prompts.get(name) if metric.startswith(SHARES) else None
        low, high = wilson(min(max(value, 0.0), 1.0), size) if size else (0.0, 0.0)
        rows.append((name, metric, f"{value:.4g}", f"{low:.3f} to {high:.3f}" if size else "", str(size or "")))
    yield "## Validation\n"
    yield f"Held-out prompts after step {at}. The intervals are Wilson's for one response to each prompt.\n"
    yield _table(("set", "metric", "value", f"{CONFIDENCE:.0%} interval", "prompts"), rows)


def _scores(metrics: Path, step: int) -> tuple[dict[tuple[str, str], float], int]:
    """Return the values of the newest validation up to a step, by set and metric, and its step."""
    newest: Mapping[str, Any] = {}
    for record in each_record(metrics) if metrics.is_file() else ():
        if record and record["step"] <= step and any(key.startswith("val/") for key in record):
            newest = record
    split = {tuple(key.split("/", 2)[1:]): value for key, value in newest.items() if key.startswith("val/")}
    found = {
        (names[0], names[1]): float(value)
        for names, value in split.items()
        if len(names) == 2 and names[1].startswith(SCORES) and isinstance(value, int | float)
    }
    return found, newest.get("step", 0)


def _prompts(samples: Path, step: int) -> dict[str, int]:
    """Return the number of prompts of each held-out set in the validation after a step."""
    found: dict[str, int] = {}
    for record in each_record(samples) if samples.is_file() else ():
        if record and record["step"] == step and record["responses"]:
            found[record["set"]] = record["responses_of_step"] // len(record["responses"])
    return found


def _versions(run: Path) -> Iterator[str]:
    for start in read_starts(run)[-1:]:
        yield "## Versions\n"
        yield _table(("package", "version"), start.versions.items())


def _table(head: tuple[str, ...], rows: Any) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in cells)
