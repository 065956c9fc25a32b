"""Reads a Python script that builds one of TRL's trainers: the values that its configuration and trainer are called
with. Nothing of the script is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CALLED = re.compile(r"(GRPO|RLOO|SFT|DPO|KTO|ORPO|Reward)(Config|Trainer)")
ADAPTER = {key: key for key in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
OF_PEFT = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Defaults of a `LoraConfig`, which are not those of TRL's command line."""
KIND_OF_BITS, COMPUTED_IN = "bnb_4bit_quant_type", "bnb_4bit_compute_dtype"
OF_BITS = {"bnb_4bit_use_double_quant": "use_bnb_nested_quant"}
"""Arguments of a `BitsAndBytesConfig` with another name in TRL. Its 4 bits are fp4 by default, and TRL's nf4."""
OBJECTS = ("args", "processing_class", "tokenizer")
"""Arguments of a trainer whose values are read elsewhere: the configuration, and what the model brings."""
SAMPLED = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
PAIRS = ("model", "ref_model", "args", "train_dataset", "eval_dataset")
POSITIONS = {
    **dict.fromkeys(("GRPO", "RLOO"), SAMPLED),
    **dict.fromkeys(("DPO", "KTO"), (*PAIRS[:3], "data_collator", *PAIRS[3:])),
    **dict.fromkeys(("SFT", "ORPO", "Reward"), ("model", "args", "data_collator", "train_dataset", "eval_dataset")),
}
"""Names of a trainer's arguments that may be given without a name."""
FILES = ("parquet", "json", "csv", "arrow")
"""Names for `load_dataset` that stand for a kind of file."""
LOADS = ("load_dataset", "load_from_disk", "from_parquet", "from_json", "from_csv")
"""Functions and methods of `datasets` that read rows."""
TRAINED, HELD_OUT = ("dataset_name", "dataset_train_split"), ("eval_dataset", "dataset_test_split")
"""Keys for the name of a set and its split: of the rows to train on, and of those held out."""
HOLDS_OUT = "train_test_split"
"""Method of a set that holds rows out, for which no split of the file stands."""
SAME_ROWS = ("shuffle", "with_format", "flatten_indices")
"""Methods of a set after which roll draws from the same rows."""


@dataclass(frozen=True)
class TrainingScript:
    """What a script gives a trainer of TRL."""

    trainer: str
    keys: Mapping[str, Any]
    computed: tuple[str, ...]
    """Keys whose values the script computes."""
    changes: tuple[str, ...] = ()
    """Methods by which the script changes the rows that it reads."""


def training_script(text: str, module: str) -> TrainingScript | None:
    """Return what a script gives its trainer; None if it is no Python or builds none.

    Args:
        module: name of the script without `.py`, for the functions that it defines.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    calls = [(match, node) for node in ast.walk(tree) if (match := _named(node)) and isinstance(node, ast.Call)]
    if not calls:
        return None
    reader = _Reader(tree, module)
    for match, call in sorted(calls, key=lambda one: one[0][2]):  # the configuration, then the trainer
        names = POSITIONS[match[1]] if match[2] == "Trainer" else ("output_dir",)
        for name, value in zip(names, call.args, strict=False):
            reader.argument(name, value)
        reader.computed += [ast.unparse(value) for value in call.args[len(names) :]]
        for keyword in call.keywords:
            reader.argument(keyword.arg, keyword.value)
    return TrainingScript(calls[0][0][1].lower(), reader.keys, tuple(reader.computed), reader.changes)


def _named(node: ast.AST) -> re.Match[str] | None:
    if not isinstance(node, ast.Call):
        return None
    return CALLED.fullmatch(_called(node))


class _Reader:
    """Collects keys, and follows names to the values that the script assigns to them once."""

    def __init__(self, tree: ast.Module, module: str) -> None:
        self.keys, self.computed = dict[str, Any](), list[str]()
        self._changes: dict[str, list[str]] = {}
        self._functions = {
            node.name: f"{module}:{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)
        }
        self._functions |= _imported(tree)
        self._of_model: list[str] = []
        self._assigned: dict[str, list[ast.expr]] = {}
        for name, value in _assignments(ast.walk(tree)):
            self._assigned.setdefault(name, []).append(value)
        self._in_order: dict[str, list[ast.expr]] = {}  # without those in functions and branches
        for name, value in _assignments(tree.body):
            self._in_order.setdefault(name, []).append(value)

    @property
    def changes(self) -> tuple[str, ...]:
        """Methods by which the script changes the rows of its sets."""
        return tuple(name for names in self._changes.values() for name in names)

    def argument(self, name: str | None, value: ast.expr) -> None:
        """Read an argument of a configuration or a trainer. None: the `**` of a mapping."""
        if name == "model":
            self.model(value)
        elif name == "train_dataset":
            self._changes[name] = self.rows(value, TRAINED)
        elif name == "eval_dataset":
            self._changes[name] = self.rows(value, HELD_OUT)
        elif name == "reward_funcs":
            self.rewards(value)
        elif name == "peft_config":
            self.adapter(value)
        elif name == "quantization_config":
            self.bits(value)
        elif name is None:
            self.computed.append(f"**{ast.unparse(value)}")
        elif name not in OBJECTS:
            self.take(name, value)

    def take(self, key: str, node: ast.expr) -> None:
        """Add a key, or note that its value is computed."""
        try:
            self.keys[key] = self._value(node)
        except ValueError:
            self.computed.append(key)

    def model(self, node: ast.expr) -> None:
        """Add the name of the model, and the arguments of the `from_pretrained` that loads it."""
        for key in self._of_model:  # a model that this one replaces
            self.keys.pop(key, None)
        self._of_model.clear()
        node = self._followed(node)
        if isinstance(node, ast.Call) and _called(node) == "get_peft_model" and len(node.args) > 1:
            self.adapter(node.args[1])
            node = self._followed(node.args[0])
        if isinstance(node, ast.Call) and _called(node) == "from_pretrained" and node.args:
            for keyword in node.keywords:
                key = "model_revision" if keyword.arg == "revision" else keyword.arg
                if key is None:
                    self.computed.append(f"**{ast.unparse(keyword.value)}")
                elif key == "quantization_config":
                    self.bits(keyword.value)
                elif key not in self.keys:
                    self._of_model.append(key)
                    self.take(key, keyword.value)
            node = node.args[0]
        self.take("model_name_or_path", node)

    def bits(self, node: ast.expr) -> None:
        """Add the keys of a `BitsAndBytesConfig`."""
        node = self._followed(node)
        if not isinstance(node, ast.Call) or _called(node) != "BitsAndBytesConfig" or node.args:
            self.computed.append("quantization_config")
            return
        for keyword in node.keywords:
            key = OF_BITS.get(keyword.arg or "", keyword.arg)
            if key is None:
                self.computed.append(f"**{ast.unparse(keyword.value)}")
            elif key == COMPUTED_IN:
                self.keys[key] = ast.unparse(keyword.value)
            else:
                self._of_model.append(key)
                self.take(key, keyword.value)
        if "load_in_4bit" in self.keys:
            self._of_model.append(KIND_OF_BITS)
            self.keys.setdefault(KIND_OF_BITS, "fp4")

    def rows(self, node: ast.expr, keys: tuple[str, str]) -> list[str]:
        """Add the set or the files that the rows are read from. Return the methods by which the script changes them."""
        split: ast.expr | None = None
        changes: list[str] = []
        seen: set[str] = set()  # names whose values come from each other
        while (inner := self._before(node, changes)) is not None:
            node, step = inner
            if isinstance(step, ast.Name) and step.id in seen:
                break
            seen |= {step.id} if isinstance(step, ast.Name) else set()
            if isinstance(step, ast.Subscript):
                split = split or step.slice
            elif isinstance(step, ast.Call) and (name := _called(step)) not in SAME_ROWS:
                changes.insert(0, name)
        if keys == HELD_OUT and HOLDS_OUT in changes:
            self.computed.append(keys[0])
            return []
        if not isinstance(node, ast.Call) or _called(node) not in LOADS:
            self.take(keys[0], node)
            return changes if keys[0] in self.keys else []
        named = {keyword.arg: self._followed(keyword.value) for keyword in node.keywords}
        first = self._followed(node.args[0]) if node.args else named.get("path", node)
        split = self._followed(named.get("split") or split or ast.Constant("train"))
        config = node.args[1] if len(node.args) > 1 else named.get("name")
        if isinstance(first, ast.Constant) and first.value in FILES:
            first = named.get("data_files") or named.get("data_dir") or node
        elif config is not None and _called(node) == "load_dataset":
            self.take("dataset_config", config)
        if isinstance(first, ast.Dict):
            first, split = self._file_of(first, split), ast.Constant("train")
        self.take(keys[0], first)
        if keys == HELD_OUT or not (isinstance(split, ast.Constant) and split.value == "train"):
            self.take(keys[1], split)
        return changes if keys[0] in self.keys else []

    def _file_of(self, files: ast.Dict, split: ast.expr) -> ast.expr:
        """Return the files of a split; those of the only one, if it has another name."""
        try:
            found = {ast.literal_eval(key): value for key, value in zip(files.keys, files.values, strict=True) if key}
            return found.get(ast.literal_eval(split)) or (
                files if len(found) > 1 else next(iter(found.values()), files)
            )
        except (ValueError, TypeError):
            return files

    def _before(self, node: ast.expr, changes: list[str]) -> tuple[ast.expr, ast.expr] | None:
        """Return the set before the last step of `load_dataset(...)["train"].map(...)`, and that step.

        The step of a name is its value. A name may be assigned again if its values come from the one before; the
        methods by which they do are added to `changes`.
        """
        if isinstance(node, ast.Name):
            values = self._assigned.get(node.id, [])
            first = [value for value in values if _root(value) != node.id]
            if len(first) != 1:
                return None
            later = [value for value in values if value is not first[0]]
            changes[:0] = [name for value in later for name in _methods(value) if name not in SAME_ROWS]
            return first[0], node
        inner = _inner(node)
        return None if inner is None else (inner, node)

    def adapter(self, node: ast.expr) -> None:
        """Add the keys of a `LoraConfig`."""
        node = self._followed(node)
        if isinstance(node, ast.Constant) and node.value is None:
            return
        if not isinstance(node, ast.Call) or _called(node) != "LoraConfig" or node.args:
            self.computed.append("peft_config")
            return
        self.keys |= {"use_peft": True} | OF_PEFT
        for keyword in node.keywords:
            if keyword.arg is None:
                self.computed.append(f"**{ast.unparse(keyword.value)}")
            else:
                self.take(ADAPTER.get(keyword.arg, f"lora_{keyword.arg}"), keyword.value)

    def _followed(self, node: ast.expr) -> ast.expr:
        """Return the value of a name: what is assigned to it once, or else, outside of functions and branches, last."""
        seen = list[ast.expr]()
        while isinstance(node, ast.Name) and (value := self._value_of(node)) is not None and value not in seen:
            seen.append(value)
            node = value
        return node

    def _value_of(self, name: ast.Name) -> ast.expr | None:
        values = self._assigned.get(name.id, [])
        if len(values) == 1:
            return values[0]
        before = [value for value in values if value.lineno < name.lineno]
        return before[-1] if before and before == self._in_order.get(name.id, [])[: len(before)] else None

    def _value(self, node: ast.expr) -> Any:
        node = self._followed(node)
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(one) for one in node.elts]
        if isinstance(node, ast.Dict):
            if None in node.keys:
                raise ValueError("it takes in another mapping")
            return {self._value(key): self._value(of) for key, of in zip(node.keys, node.values, strict=True) if key}
        found = ast.literal_eval(node)
        if not isinstance(found, str | int | float | None):
            raise ValueError(f"no value of a configuration: {found!r}")  # `...` stands for what a page leaves out
        return found

    def rewards(self, node: ast.expr) -> None:
        """Add the names of reward functions, or their texts where the script computes them, and of a reward model,
        which is written as a text.
        """
        node = self._followed(node)
        found = [self._followed(one) for one in (node.elts if isinstance(node, ast.List | ast.Tuple) else [node])]
        models = [one for one in found if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if models:
            self.take("reward_model_name_or_path", models[0])
        if names := [self._function(one) for one in found if one not in models[:1]]:
            self.keys["reward_funcs"] = names

    def _function(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name) and node.id in self._functions:
            return self._functions[node.id]
        return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def _called(node: ast.Call) -> str:
    """Return the name of the called function or method, or an empty text."""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _inner(node: ast.expr) -> ast.expr | None:
    """Return the set in `load_dataset(...)["train"]` and `load_dataset(...).map(...)`; None for the call itself."""
    if isinstance(node, ast.Subscript):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr not in LOADS:
        return node.func.value
    return None


def _root(node: ast.expr) -> str:
    """Return the name that a chain of methods and subscripts starts with, or an empty text."""
    while (inner := _inner(node)) is not None:
        node = inner
    return node.id if isinstance(node, ast.Name) else ""


def _methods(node: ast.expr) -> list[str]:
    """Return the methods of a chain, in the order of their calls."""
    found: list[str] = []
    while (inner := _inner(node)) is not None:
        found[:0] = [_called(node)] if isinstance(node, ast.Call) else []
        node = inner
    return found


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the imported names: TRL's own as they are, others as `module:name`."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {
        one.asname or one.name: one.name if str(node.module).split(".")[0] == "trl" else f"{node.module}:{one.name}"
        for node in imports
        for one in node.names
    }


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that are assigned, with their values, also of `a, b = x, y`."""
    for node in nodes:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = [*zip(target.elts, value.elts, strict=True)]
        else:
            pairs = [(target, value)]
        yield from ((name.id, of) for name, of in pairs if isinstance(name, ast.Name))
