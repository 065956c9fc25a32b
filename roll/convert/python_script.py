"""Reads a Python script that builds one of TRL's trainers: the values that its configuration and trainer are called
with. Nothing of the script is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CALLED = re.compile(r"(GRPO|RLOO|SFT|DPO|KTO|ORPO|Reward)(Config|Trainer)")
ADAPTER = {"r": "lora_r"} | {key: key for key in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
OBJECTS = ("args", "processing_class", "tokenizer")
"""Arguments of a trainer whose values are read elsewhere: the configuration, and what the model brings."""
POSITIONS = {"Config": ("output_dir",), "Trainer": ("model",)}
"""Names of arguments that may be given without a name."""
FILES = ("parquet", "json", "csv", "arrow")
"""Names for `load_dataset` that stand for a kind of file."""


@dataclass(frozen=True)
class TrainingScript:
    """What a script gives a trainer of TRL."""

    trainer: str
    keys: Mapping[str, Any]
    computed: tuple[str, ...]
    """Keys whose values the script computes."""


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
        for name, value in zip(POSITIONS[match[2]], call.args, strict=False):
            reader.argument(name, value)
        for keyword in call.keywords:
            reader.argument(keyword.arg, keyword.value)
    return TrainingScript(calls[0][0][1].lower(), reader.keys, tuple(reader.computed))


def _named(node: ast.AST) -> re.Match[str] | None:
    if not isinstance(node, ast.Call):
        return None
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    return CALLED.fullmatch(name)


class _Reader:
    """Collects keys, and follows names to the values that the script assigns to them once."""

    def __init__(self, tree: ast.Module, module: str) -> None:
        self.keys, self.computed, self._module = dict[str, Any](), list[str](), module
        self._functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assigned = list(_assignments(tree))
        names = [name for name, _ in assigned]
        self._values = {name: value for name, value in assigned if names.count(name) == 1}

    def argument(self, name: str | None, value: ast.expr) -> None:
        """Read an argument of a configuration or a trainer. None: the `**` of a mapping."""
        if name == "model":
            self.take("model_name_or_path", self._loaded(value))
        elif name == "train_dataset":
            self.take("dataset_name", self.source_of(value))
        elif name == "peft_config":
            self.adapter(value)
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

    def source_of(self, node: ast.expr) -> ast.expr:
        """Return what names the rows: the set or the files of a call of `load_dataset`."""
        node = self._followed(node)
        while (inner := _inner(node)) is not None:
            node = self._followed(inner)
        if not (isinstance(node, ast.Call) and node.args):
            return node
        files = next((one.value for one in node.keywords if one.arg == "data_files"), None)
        first = node.args[0]
        return files if files is not None and isinstance(first, ast.Constant) and first.value in FILES else first

    def adapter(self, node: ast.expr) -> None:
        """Add the keys of a `LoraConfig`."""
        node = self._followed(node)
        if not isinstance(node, ast.Call):
            return
        self.keys["use_peft"] = True
        for keyword in node.keywords:
            if keyword.arg in ADAPTER:
                self.take(ADAPTER[keyword.arg], keyword.value)
            elif keyword.arg == "target_modules":
                self.take("lora_target_modules", keyword.value)

    def _loaded(self, node: ast.expr) -> ast.expr:
        """Return what names the model: that of `from_pretrained`, or the node itself."""
        node = self._followed(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained":
            return next(iter(node.args), node)
        return node

    def _followed(self, node: ast.expr) -> ast.expr:
        seen = set[str]()
        while isinstance(node, ast.Name) and node.id in self._values and node.id not in seen:
            seen.add(node.id)
            node = self._values[node.id]
        return node

    def _value(self, node: ast.expr) -> Any:
        node = self._followed(node)
        if isinstance(node, ast.Name) and node.id in self._functions:
            return f"{self._module}:{node.id}"
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(one) for one in node.elts]
        return ast.literal_eval(node)


def _inner(node: ast.expr) -> ast.expr | None:
    """Return the set in `load_dataset(...)["train"]` and `load_dataset(...).map(...)`; None for the call itself."""
    if isinstance(node, ast.Subscript):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr != "load_dataset":
        return node.func.value
    return None


def _assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
