"""Compares what `loss_on: assistant` learns with the masks of TRL's training templates, family by family.

    git clone https://github.com/huggingface/trl PEER
    python benchmarks/template_masks.py --templates PEER/trl/chat_templates

TRL has a training template `NAME_training.jinja` for a model's own template `NAME.jinja`. It renders each row once, and
marks the tokens of the assistant. roll reads the same row with the model's own template. Two differences are meant:
roll leaves out the start of a turn that the generation prompt writes, and the white space after the end of a turn,
because the policy generates neither. The status is 1 if there is another difference that is not in EXPECTED.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

import datasets
from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roll.config.schema.model import DataConfig
from roll.data.examples import LengthLimits, prepare_examples
from roll.data.native import Form, NativeTemplate
from roll.errors import DataError

EQUAL, MEANT, DIFFERS = "equal", "header and newline", "differs"
REFUSED, LOST, NEITHER = "refused", "refused, TRL loses text", "both refuse"
MARKS = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>]+｜>|<\|?[a-z_]+\|?>|</[a-z_]+>|\[/?[A-Za-z_]+\]|<[A-Z_]+_TOKEN>")
"""Texts of a template that are special tokens of its tokenizer."""
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|return|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
)
BEGINNINGS = ("<bos>", "<|begin_of_text|>", "<BOS_TOKEN>", "<｜begin▁of▁sentence｜>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "sum_up",
            "description": "Adds one up.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "description": "One."}},
                "required": ["x"],
            },
        },
    }
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "sum_up", "arguments": {"x": 1}}}
ANSWER = {"role": "tool", "content": "The sum is three", "tool_call_id": "call00001", "name": "sum_up"}
HELLO, AGAIN = {"role": "user", "content": "Hello to you"}, {"role": "user", "content": "And what now?"}


def said(text: str, **more: Any) -> dict[str, Any]:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": text, **more}


ROWS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"messages": [HELLO, said("One is here."), AGAIN, said("Two is here.")]},
    "system": {
        "messages": [
            {"role": "system", "content": "Be very brief."},
            HELLO,
            said("One is here."),
            AGAIN,
            said("Two is here."),
        ]
    },
    "thinking": {"messages": [HELLO, said("One is here.", reasoning_content="The first thought")]},
    "thoughts": {
        "messages": [
            *(HELLO, said("One is here.", reasoning_content="The first thought")),
            *(AGAIN, said("Two is here.", reasoning_content="The second thought")),
        ]
    },
    "tools": {
        "messages": [HELLO, said("", tool_calls=[CALL]), ANSWER, said("It is three."), AGAIN, said("Two is here.")],
        "tools": TOOLS,
    },
    "call at end": {"messages": [HELLO, said("One is here."), AGAIN, said("", tool_calls=[CALL])], "tools": TOOLS},
    "text, call": {
        "messages": [HELLO, said("Let me add it.", tool_calls=[CALL]), ANSWER, said("It is three.")],
        "tools": TOOLS,
    },
    "thought, call": {
        "messages": [
            HELLO,
            said("", reasoning_content="The first thought", tool_calls=[CALL]),
            ANSWER,
            said("It is three."),
        ],
        "tools": TOOLS,
    },
}
KEPT = {"thoughts": "TRL drops the thinking of the first turn; roll learns the turn as the policy generates it"}
EXPECTED: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("glm4moe", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"), KEPT),
    "diffusion_gemma": {
        **KEPT,
        **dict.fromkeys(
            ("tools", "call at end", "thought, call"),
            "TRL learns no end of a call, roll <|tool_response>; and the start of a turn that no generation prompt "
            "writes after an answer",
        ),
    },
    "gptoss": {
        **KEPT,
        "text, call": "the template drops the text before a call once an answer follows; roll learns it as the policy "
        "generates it",
        "thought, call": "the template drops the thinking before a call once an answer follows; roll learns it as the "
        "policy generates it",
    },
    "deepseekv3": {
        **dict.fromkeys(
            ("thinking", "thoughts"), "TRL's template drops all thinking; roll learns it after the prompt that opens it"
        )
    },
}
"""Differences that are meant, by family and row, each with its reason."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Return the exit status."""
    found = argparse.ArgumentParser(
        "benchmarks/template_masks.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    found.add_argument("--templates", type=Path, required=True, help="folder with NAME.jinja and NAME_training.jinja")
    found.add_argument("--show", metavar="NAME", help="print both readings of each row of one family")
    given = found.parse_args(argv)
    datasets.disable_progress_bars()
    files = sorted(given.templates.glob("*_training.jinja"))
    if not files:
        found.error(f"'{given.templates}' has no *_training.jinja")
    print("| family | " + " | ".join(ROWS) + " |\n|---|" + "---|" * len(ROWS))
    unexpected = []
    for file in files:
        name = file.name.removesuffix("_training.jinja")
        own, training = (given.templates / f"{name}.jinja").read_text(), file.read_text()
        verdicts = {row: compared(own, training, ROWS[row], given.show == name) for row in ROWS}
        notes = {
            row: verdict + ("*" if row in EXPECTED.get(name, {}) and verdict == DIFFERS else "")
            for row, verdict in verdicts.items()
        }
        print(f"| {name} | " + " | ".join(notes.values()) + " |")
        unexpected += [f"{name}: {row}" for row, note in notes.items() if note == DIFFERS]
    reasons = {reason for rows in EXPECTED.values() for reason in rows.values()}
    print("\n* meant:", *(f"- {reason}" for reason in sorted(reasons)), sep="\n")
    print(*(f"not meant: {one}" for one in unexpected), sep="\n")
    return 1 if unexpected else 0


def compared(own: str, training: str, row: Mapping[str, Any], show: bool = False) -> str:
    """Return how what roll learns of a row differs from what TRL learns.

    Args:
        own: the model's chat template.
        training: TRL's template.
        show: whether to print both.
    """
    tokenizer = made_tokenizer(own)
    form = NativeTemplate(tokenizer).form
    theirs = trl_pieces(tokenizer, training, row, form)
    ours: list[tuple[str, bool]] | str = roll_pieces(tokenizer, row)
    if show:
        print(f"roll: {shown(ours)}\nTRL:  {shown(theirs)}\n")
    if isinstance(ours, str):
        if isinstance(theirs, str):
            return NEITHER
        text = "".join(piece for piece, _ in theirs)
        return REFUSED if all(one in text for one in texts_of(row)) else LOST
    if isinstance(theirs, str):
        return DIFFERS
    if flat(ours) == flat(theirs):
        return EQUAL
    return MEANT if flat(ours) == flat(policy_part(theirs, header_of(tokenizer))) else DIFFERS


def policy_part(pieces: list[tuple[str, bool]], header: str) -> list[tuple[str, bool]]:
    """Return TRL's pieces, with only what the policy generates marked as learnt.

    Args:
        header: the start of a turn that the generation prompt writes.
    """
    found: list[tuple[str, bool]] = []
    for text, learnt in pieces:
        if not learnt:
            found.append((text, False))
            continue
        before = "".join(one for one, _ in found)
        given = max((at for at in range(len(header) + 1) if before.endswith(header[:at])), default=0)
        written = len(commonprefix([text, header[given:]])) if header else 0
        said_text = text[written:].rstrip()
        found += [(text[:written], False), (said_text, True), (text[written + len(said_text) :], False)]
    return found


def header_of(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the start of a turn that the generation prompt writes."""
    form = NativeTemplate(tokenizer).form
    closed, opened = (
        str(tokenizer.apply_chat_template([form.of(HELLO)], tokenize=False, add_generation_prompt=generate))
        for generate in (False, True)
    )
    end = closed.rfind(HELLO["content"])
    shared = commonprefix([closed[end:], opened[end:]])
    # A token that both begin with is not cut: `<|end|><|assistant|>` and `<|end|><|endoftext|>` share no part of their
    # last token.
    cut = next(
        (mark.start() for mark in MARKS.finditer(opened[end:]) if mark.start() < len(shared) < mark.end()), len(shared)
    )
    return opened[end + cut :]


def roll_pieces(tokenizer: PreTrainedTokenizerFast, row: Mapping[str, Any]) -> list[tuple[str, bool]] | str:
    """Return the text that roll trains on in pieces, each with whether it is learnt; or the reason why the row is
    refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text(json.dumps(row) + "\n")
        data_args = DataConfig.model_validate({"file_name": str(file), "messages": "messages"})
        try:
            rows = prepare_examples(
                data_args, tokenizer, LengthLimits(10**5, 10**5), "turns", cache_folder=Path(folder) / "cache"
            )
        except DataError as error:
            return error.faults[0].problem
        sequence = rows.example(0).sequences[0]
        return list(runs(tokenizer, sequence.token_ids.tolist(), sequence.response_mask.tolist()))


def trl_pieces(
    tokenizer: PreTrainedTokenizerFast, training: str, row: Mapping[str, Any], form: Form
) -> list[tuple[str, bool]] | str:
    """Return the text that TRL trains on in pieces, each with whether it is learnt; or the reason why its template
    refuses the row.
    """
    messages = [Form(form.parts, False, form.reasoning).of(message) for message in row["messages"]]
    try:
        found: Any = tokenizer.apply_chat_template(
            messages,
            tools=row.get("tools"),
            chat_template=training,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except (TemplateError, TypeError) as error:
        return str(error)
    return list(runs(tokenizer, found["input_ids"], found["assistant_masks"]))


def runs(
    tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int], mask: Sequence[bool]
) -> Iterator[tuple[str, bool]]:
    """Yield the text of each run of tokens with the same mask."""
    first = 0
    for at in range(1, len(token_ids) + 1):
        if at == len(token_ids) or bool(mask[at]) != bool(mask[first]):
            yield str(tokenizer.decode(list(token_ids[first:at]), skip_special_tokens=False)), bool(mask[first])
            first = at


def flat(pieces: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Return the characters with their masks, without white space that is not learnt at the end."""
    found = [(character, learnt) for text, learnt in pieces for character in text]
    while found and found[-1][0].isspace() and not found[-1][1]:
        found.pop()
    return found


def shown(pieces: list[tuple[str, bool]] | str) -> str:
    """Return the text with what is learnt in brackets."""
    return repr(
        pieces if isinstance(pieces, str) else "".join(f"⟦{text}⟧" if learnt else text for text, learnt in pieces)
    )


def texts_of(row: Mapping[str, Any]) -> list[str]:
    """Return the texts that a rendering of the row must have: contents, thinking, and the value of a call."""
    messages = row["messages"]
    calls = ["sum_up", "x"] if any("tool_calls" in one for one in messages) else []
    tools = [tool["function"]["description"] for tool in row.get("tools", ())]
    return [
        *(one["content"] for one in messages),
        *(one.get("reasoning_content", "") for one in messages),
        *calls,
        *tools,
    ]


def made_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the special tokens that a template writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    marks = [mark[0] for mark in MARKS.finditer(template)]
    end = next((one for one in ENDS if one in template), "<|endoftext|>")
    begun = next((one for one in BEGINNINGS if one in template), "<bos>" if "bos_token" in template else None)
    names = dict.fromkeys([*marks, end, *([begun] if begun else [])])
    backend.add_special_tokens([AddedToken(str(name), special=True, normalized=False) for name in names])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, bos_token=begun)
    made.chat_template = template
    return made


if __name__ == "__main__":
    sys.exit(main())
