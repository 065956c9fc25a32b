"""Positions of tokens around pictures, the selection of a batch's pictures, and what of a model is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.tiny.make_seeing_model import FAMILIES, MERGE, build_config, build_seeing_model, write_seeing_model
from roll.config.derived.model_shape import PATCHED, shape_of
from roll.config.schema.model import ModelConfig
from roll.data import packing
from roll.errors import ConfigError
from roll.models.layers import decoder_layers
from roll.models.load import add_lora, load_causal_model, load_policy, load_seeing_policy, restore_frequencies
from roll.models.packed import packed_inputs
from roll.models.pictures import PROJECTORS, freeze_vision, positions, vision_parameters
from roll.models.vision_names import is_of_vision
from roll.types import Pictures, Sequences
from tests.engines.seeing import SHOWN, batch_of
from tests.faults import assert_fault

TOKEN = 261


def shown_sequences() -> Sequences:
    """Return sequences with 2, 0, 1 and 3 pictures of different grids, of which two are adjacent."""
    grids = [[(2, 3), (1, 4)], [], [(3, 1)], [(1, 1), (2, 2), (5, 2)]]
    token_ids, shown, first = [], [], 0
    for number, own in enumerate(grids):
        parts, starts = [np.arange(number + 1)], []
        for height, width in own:
            starts.append(sum(map(len, parts)))
            parts += [np.full(height * width, TOKEN), np.arange(0 if number == 3 and height == 1 else 2)]
        ids = np.concatenate([*parts, np.arange(3)])
        token_ids.append(ids.astype(np.int32))
        rows = np.array([height * width * MERGE**2 for height, width in own], np.int64)
        values = np.arange(first, first + rows.sum(), dtype=np.float32)[:, None]
        first += int(rows.sum())
        shown.append(Pictures(values, rows, np.array(own), np.array(starts), np.array([len(own)])) if own else None)
    return packing.concatenate(token_ids, [np.arange(len(ids)) > len(ids) - 2 for ids in token_ids], shown)


@pytest.mark.parametrize("family", PATCHED)
def test_positions_are_those_of_transformers(family: str) -> None:
    sequences = shown_sequences()
    assert sequences.shown is not None
    with torch.device("meta"):
        model: Any = build_seeing_model(family, seed=0)
    found, firsts = positions(sequences), np.cumsum(sequences.shown.counts) - sequences.shown.counts
    for number, (begin, end) in enumerate(zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)):
        grids = sequences.shown.grids[firsts[number] : firsts[number] + sequences.shown.counts[number]]
        ids = torch.from_numpy(sequences.token_ids[begin:end].astype(np.int64))[None]
        # transformers tells adjacent pictures apart by the type of the tokens between them.
        if number == 3:
            continue
        expected, _ = model.model.get_rope_index(
            ids,
            (ids == TOKEN).int(),
            torch.nn.functional.pad(torch.from_numpy(grids.astype(np.int64)) * MERGE, (1, 0), value=1),
        )
        assert np.array_equal(found[:, begin:end], expected[:, 0].numpy())


def test_positions_of_adjacent_pictures_follow_each_other() -> None:
    begin = shown_sequences().offsets[3]
    # Four tokens of text, a picture of one token, one of 2 x 2 that follows at once, two tokens, and one of 5 x 2.
    expected = [
        [0, 1, 2, 3, 4, 5, 5, 5, 5, 7, 8, *[9] * 10, 14, 15, 16, 17, 18],
        [0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 15, 16, 17, 18],
        [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 8, *[9, 10] * 5, 14, 15, 16, 17, 18],
    ]
    assert positions(shown_sequences())[:, begin:].tolist() == expected


def test_positions_without_grids_are_those_of_text() -> None:
    sequences = packing.select(shown_sequences(), [1])
    assert sequences.shown is None and positions(sequences).tolist() == list(range(len(sequences.token_ids)))


@pytest.mark.parametrize("indices", [[0], [3, 0], [1], [2, 3], [0, 1, 2, 3], [3, 2, 1, 0]])
def test_selection_keeps_each_sequences_own_pictures(indices: list[int]) -> None:
    whole = shown_sequences()
    assert whole.shown is not None
    chosen = packing.select(whole, indices)
    counts = whole.shown.counts[indices]
    if not counts.sum():
        assert chosen.shown is None
        return
    assert chosen.shown is not None and chosen.shown.counts.tolist() == counts.tolist()
    firsts = np.cumsum(whole.shown.counts) - whole.shown.counts
    pictures = [
        int(first + number) for i in indices for first in [firsts[i]] for number in range(whole.shown.counts[i])
    ]
    ends = np.cumsum(whole.shown.rows)
    rows = [row for picture in pictures for row in range(ends[picture] - whole.shown.rows[picture], ends[picture])]
    assert chosen.shown.values[:, 0].tolist() == rows
    assert chosen.shown.grids.tolist() == whole.shown.grids[pictures].tolist()
    assert chosen.shown.starts.tolist() == whole.shown.starts[pictures].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_shape_counts_all_parameters(family: str, tied: bool) -> None:
    with torch.device("meta"):
        model = build_seeing_model(family, seed=0, tied=tied)
    shape = shape_of(json.loads(build_config(family, tied).to_json_string()), asked=True)
    assert shape is not None and shape.vision is not None
    sizes = {name: parameter.numel() for name, parameter in vision_parameters(model)}
    assert shape.vision.projector == sum(size for name, size in sizes.items() if PROJECTORS.search(name)) > 0
    assert shape.vision.tower + shape.vision.projector == sum(sizes.values())
    assert shape.parameters == model.num_parameters() and shape.active_parameters == shape.parameters - sum(
        sizes.values()
    )


def test_older_files_have_shape_of_newer_ones() -> None:
    # As in the config.json of Qwen2.5-VL-3B: the keys of the text model are not in a block of their own.
    whole = json.loads(build_config("qwen2_5_vl").to_json_string())
    flat = {key: value for key, value in whole.items() if key != "text_config"} | whole["text_config"]
    assert shape_of(flat | {"model_type": "qwen2_5_vl"}) == shape_of(whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_parts_are_told_from_text_model(family: str) -> None:
    model = build_seeing_model(family, seed=0)
    assert len(decoder_layers(model)) == 3
    names = {name for name, _ in model.named_parameters()}
    projector = {name for name in names if PROJECTORS.search(name)}
    tower = {name for name in names if is_of_vision(name)} - projector
    assert tower and projector and not any("layers.0.self_attn" in name and "text" in name for name in tower)
    for frozen, stays in (("none", set()), ("tower", tower), ("all", tower | projector)):
        model.requires_grad_(True)
        freeze_vision(model, frozen)  # type: ignore[arg-type]
        assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == stays


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("target", ["all-linear", "q_proj,down_proj"])
def test_adapter_is_on_text_model_alone(family: str, target: str) -> None:
    model = build_seeing_model(family, seed=0)
    adapted = add_lora(model, ModelConfig.model_validate({"lora_target": target}), seed=0)
    layers = {name.partition(".lora_A")[0] for name, _ in adapted.named_parameters() if ".lora_A" in name}
    # Two of Qwen3.5's layers have five other projections in place of the four of attention.
    counts = {"all-linear": 23, "q_proj,down_proj": 4} if family == "qwen3_5" else {"all-linear": 21}
    assert len(layers) == counts.get(target, 6) and not any(map(is_of_vision, layers))
    assert all(".lora_" in name for name, parameter in adapted.named_parameters() if parameter.requires_grad)


def test_adapter_on_layer_of_tower_is_refused() -> None:
    model = build_seeing_model("qwen2_5_vl", seed=0)
    with pytest.raises(ConfigError) as caught:
        add_lora(model, ModelConfig.model_validate({"lora_target": "qkv"}), seed=0)
    assert_fault(caught.value.faults, "lora_target", "not_supported", "'qkv'", "all-linear")


def test_micro_batch_without_picture_gives_tower_zero_gradient(tmp_path: Path) -> None:
    write_seeing_model(tmp_path / "model", "qwen3_vl", seed=0)
    policy = load_seeing_policy(str(tmp_path / "model"), ModelConfig.model_validate({"dtype": "fp32"}), 0)
    sequences = packing.concatenate([np.arange(5, dtype=np.int32)], [np.arange(5) > 2])
    policy(packed_inputs(sequences, "cpu"))[0].sum().backward()
    gradients = [parameter.grad for _, parameter in vision_parameters(policy.causal)]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_sees_shared_pictures_once(family: str, tmp_path: Path) -> None:
    """Responses to one prompt give the log-probs and the gradients of sequences with pictures of their own."""
    write_seeing_model(tmp_path / "model", family, seed=0)
    policy = load_seeing_policy(str(tmp_path / "model"), ModelConfig.model_validate({"dtype": "fp32"}), 0)
    token: int = policy.causal.config.image_token_id
    prompts = [batch_of(family, token, [sizes]).sequences for sizes in SHOWN]
    chance = np.random.default_rng(0)
    rows = {"shared": 0, "own": 0}
    token_ids, masks = [], []
    for prompt in (2, 2, 1, 0, 2, 0):
        length = len(prompts[prompt].token_ids)
        token_ids.append(np.concatenate([prompts[prompt].token_ids, chance.integers(0, 250, 4)]).astype(np.int32))
        masks.append(np.arange(length + 4) >= length)
    found = {}
    for name in rows:
        shown = [prompts[prompt].shown for prompt in (2, 2, 1, 0, 2, 0)]
        if name == "own":
            shown = [one and replace(one) for one in shown]
        whole = packing.concatenate(token_ids, masks, shown)
        # Reversed, so that the order of the rows differs from that of the sequences.
        micro = packing.select(whole, [5, 4, 2, 1, 0])
        assert micro.shown is not None and (micro.shown.shared is not None) == (name == "shared")
        rows[name] = len(micro.shown.values)
        policy.zero_grad()
        log_probs, _ = policy(packed_inputs(micro, "cpu"))
        log_probs.sum().backward()
        found[name] = [log_probs.detach(), *(each.grad for _, each in policy.causal.named_parameters())]
    assert rows["own"] > 1.9 * rows["shared"]
    for one, other in zip(found["shared"], found["own"], strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_gemma_without_its_tower_is_trained_on_text(tmp_path: Path) -> None:
    write_seeing_model(tmp_path / "model", "gemma3", seed=0)
    policy = load_policy(str(tmp_path / "model"), ModelConfig.model_validate({"dtype": "fp32"}), seed=0)
    assert policy.tower is None and not any(each.requires_grad for _, each in vision_parameters(policy.causal))
    policy(packed_inputs(packing.concatenate([np.arange(9, dtype=np.int32)], [np.arange(9) > 2]), "cpu"))[
        0
    ].sum().backward()
    trained = {name for name, each in policy.causal.named_parameters() if each.requires_grad}
    assert trained == {name for name, each in policy.causal.named_parameters() if each.grad is not None}
    assert trained and len(decoder_layers(policy.causal)) == 3


def test_frequencies_of_each_kind_of_layer_are_restored() -> None:
    model, expected = (build_seeing_model("gemma3", seed=0) for _ in range(2))
    for module in model.modules():
        for name, each in dict(module.named_buffers(recurse=False)).items():
            if each.is_floating_point():
                module.register_buffer(name, each.bfloat16(), persistent=False)
    restore_frequencies(model)
    found = dict(model.named_buffers())
    wanted = {name: each for name, each in expected.named_buffers() if name.endswith("inv_freq")}
    assert len(wanted) == 4 and all(torch.equal(found[name], each) for name, each in wanted.items())


def test_loaders_of_text_models_refuse_seeing_models(tmp_path: Path) -> None:
    write_seeing_model(tmp_path / "model", "qwen2_5_vl", seed=0)
    from roll.errors import DataError

    arguments = ModelConfig.model_validate({"dtype": "fp32"})
    for load in (load_causal_model, lambda path, args: load_policy(path, args, 0)):
        with pytest.raises(DataError) as caught:
            load(str(tmp_path / "model"), arguments)
        assert_fault(caught.value.faults, "pretrain", "unfit", "pictures", "a model of text alone")
