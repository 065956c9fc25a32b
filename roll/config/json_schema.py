"""Generates a JSON schema of experiment files, with which editors complete and check keys.

`python -m roll.config.json_schema [FILE]` prints or writes it. A line in an experiment's file names it, relative to
that file: `# yaml-language-server: $schema=FILE`.

It accepts what a single file may hold, which is less strict than the check of the composed configuration: no key is
required, because a file in `defaults` may have it, and `${...}` and `???` may stand for every value. Keys of ROLL are
accepted with what they mean. Of a file's own variables it knows only those of ROLL, as no schema can tell a variable
from a typing error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from roll.config.docs import meaning
from roll.config.schema.fields import walk
from roll.config.schema.foreign_names import IGNORED, READ_AS, READ_SPECIALLY, ROLE, ROLES, VARIABLES
from roll.config.schema.pipelines import PIPELINES
from roll.config.shipped import deepspeed_presets, preset_names

Schema = dict[str, Any]
DRAFT = "http://json-schema.org/draft-07/schema#"
DEFINITIONS = "definitions"
OF_OMEGACONF = r"\$\{|^\?\?\?$"
"""Texts that stand for any value: an interpolation, or what another file has to set."""
OTHER_TEXT = {"patternErrorMessage": "A text can only be ${...} or ??? here."}
"""What editors say of another text."""
ALSO: Mapping[str, Schema] = {
    "strategy_config": {
        "type": ["string", "null"],
        "description": "Name of a preset, or path of DeepSpeed's JSON file.",
    },
    "device_mapping": {"type": "string", "pattern": r"^list\(range\(.+\)\)$"},
}
"""Forms of values that are read before the schema checks them: a preset's name or DeepSpeed's JSON file, and ranges."""
OF_HYDRA: Mapping[str, Schema] = {
    "defaults": {
        "type": "array",
        "items": {"type": ["string", "object"]},
        "description": "Files and groups that this one includes, such as `../config/deepspeed_zero3@_here_`; "
        "`_self_` is the place of this file's own keys.",
    },
    "hydra": {"type": "object", "description": "Keys of Hydra."},
}


class _Generator(GenerateJsonSchema):
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}


def experiment_schema() -> Schema:
    """Return the schema of an experiment's file, of any pipeline."""
    blocks: dict[str, Schema] = {}
    roots: dict[str, Schema] = {}
    for name, pipeline in PIPELINES.items():
        made = pipeline.model_json_schema(ref_template=f"#/{DEFINITIONS}/{{model}}", schema_generator=_Generator)
        blocks |= made.pop("$defs")
        roots[name] = made
    _describe({**blocks, **{pipeline.__name__: roots[name] for name, pipeline in PIPELINES.items()}})
    keys = {key for root in roots.values() for key in root["properties"]}
    root: Schema = {key: _of_pipelines(key, roots.values()) for key in sorted(keys)}
    for place, text in _keys_of_roll():
        _add(place, {"description": text}, root, blocks)
    others: Schema = {
        **OF_HYDRA,
        **{name: {"description": "A variable."} for name in VARIABLES},
        **{name: {"type": "object", "description": "A preset."} for name in sorted(preset_names())},
        **{name: {"$ref": f"#/{DEFINITIONS}/DeepSpeedConfig"} for name in deepspeed_presets()},
    }
    foreign = {*root} - keys | {*others}
    return {
        "$schema": DRAFT,
        "title": "An experiment of roll",
        "type": "object",
        "properties": {**{key: _value(key, below) for key, below in root.items()}, **others},
        "additionalProperties": False,
        "allOf": [
            {
                "if": {"properties": {"pipeline": {"const": name}}, "required": ["pipeline"]},
                "then": {"propertyNames": {"enum": sorted({*one["properties"]} | foreign)}},
            }
            for name, one in roots.items()
        ],
        DEFINITIONS: {name: _removable(_opened(block)) for name, block in sorted(blocks.items())},
    }


def _describe(blocks: Mapping[str, Schema]) -> None:
    """Give each key the meaning that docs/configuration.md has, with the methods that read it."""
    for key in (key for pipeline in PIPELINES.values() for key in walk(pipeline)):
        if key.section.__name__ in blocks:
            blocks[key.section.__name__]["properties"][key.path[-1]]["description"] = meaning(key.path[-1], key.field)


def _of_pipelines(key: str, roots: Iterable[Schema]) -> Schema:
    """Return the schema of a root key, which pipelines may have with different blocks."""
    found = [root["properties"][key] for root in roots if key in root["properties"]]
    different = [one for number, one in enumerate(found) if one not in found[:number]]
    return different[0] if len(different) == 1 else {"anyOf": different, "description": different[0]["description"]}


def _keys_of_roll() -> Iterator[tuple[str, str]]:
    """Yield the paths of ROLL's keys with what roll does with them."""
    yield from ((place, f"Of ROLL; ignored: {reason}") for place, reason in IGNORED.items())
    yield from ((place, f"Of ROLL; read as `{ours}`.") for place, ours in READ_AS.items())
    yield from ((place, f"Of ROLL; {text}") for place, text in READ_SPECIALLY.items())


def _add(place: str, schema: Schema, root: Schema, blocks: Mapping[str, Schema]) -> None:
    """Add a key of ROLL at its path, unless roll has the key too. Paths in blocks that only ROLL has are left out."""
    for steps in [place.replace(ROLE, role).split(".") for role in (ROLES if ROLE in place else ("",))]:
        found = [root]
        for step in steps[:-1]:
            found = [properties for below in found for properties in _blocks_below(below.get(step, {}), blocks)]
        for properties in found:
            if steps[-1].isidentifier():
                properties.setdefault(steps[-1], schema)


def _blocks_below(schema: Schema, blocks: Mapping[str, Schema]) -> list[Schema]:
    """Return the properties of all blocks that a value may be."""
    if "$ref" in schema:
        return [blocks[schema["$ref"].rpartition("/")[2]].setdefault("properties", {})]
    inner = [one for kind in ("anyOf", "oneOf") for one in schema.get(kind, ())]
    return [found for one in inner for found in _blocks_below(one, blocks)]


def _value(key: str, schema: Schema) -> Schema:
    """Return the schema of a key's value in a file."""
    opened = _opened(schema)
    if key in ALSO:
        opened = {"anyOf": [*opened.pop("anyOf", [{"$ref": opened.pop("$ref", "")}]), ALSO[key]], **opened}
    return opened


def _removable(block: Schema) -> Schema:
    """Return the schema of a block for which null may stand: it removes the block of an included file."""
    kinds = block.get("type", [])
    return {**block, "type": [*kinds, "null"]} if "object" in kinds else block


def _opened(schema: Schema) -> Schema:
    """Return the schema of a value, or of a block, for which `${...}` may stand, and of which a file may hold a part.

    `pattern` says something of texts only, as `properties` and `minimum` do of blocks and numbers. So both can stand
    beside each other, and an editor names the wrong key; of alternatives it would only say that none fits.
    """
    left_out = ("title", "required", "discriminator", "oneOf", *(("default",) if schema.get("default") is None else ()))
    opened: Schema = {name: part for name, part in schema.items() if name not in left_out}
    if union := [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        opened["anyOf"] = [_opened(part) for part in union]
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            opened[name] = _opened(schema[name])
    if "properties" in schema:
        opened["properties"] = {key: _value(key, below) for key, below in schema["properties"].items()}
    if "patternProperties" in schema:
        opened["patternProperties"] = {name: _opened(part) for name, part in schema["patternProperties"].items()}
    if listed := {name: opened.pop(name) for name in ("enum", "const") if name in opened}:
        opened.pop("type", None)
        return {"anyOf": [listed, {"type": "string", "pattern": OF_OMEGACONF}], **opened}
    kinds = opened.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "pattern" in opened:
        opened["pattern"] = f"{opened['pattern']}|{OF_OMEGACONF}"
    elif kinds and "string" not in kinds:
        opened |= {"type": [*kinds, "string"], "pattern": OF_OMEGACONF, **OTHER_TEXT}
    return opened


def main() -> None:
    """Print the schema, or write it to the file named on the command line."""
    text = json.dumps(experiment_schema(), indent=1, ensure_ascii=False) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
