"""Writes rows with pictures: a coloured shape on grey, and the answer which one it is.

    python examples/tiny/make_shapes.py FOLDER [--rows 1600] [--held-out 64] [--seed 0]

writes FOLDER/train.jsonl for SFT, the same rows for RLVR without the answer in the messages (FOLDER/questions.jsonl),
those of some more pictures (FOLDER/heldout.jsonl), and FOLDER/pictures. Every colour and every shape is as likely as
the others, so that a model that does not see the pictures can only guess: its loss is at least ln(12) nats an answer,
and 1 of 12 of its answers is right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220), "white": (245, 245, 245)}
SHAPES = ("circle", "square", "triangle")
GREY = (110, 110, 110)
SIDES = (32, 40, 48)
"""Sides of the pictures in pixels."""
HELD_OUT = 64
"""Number of pictures in addition to those of the rows for training, by default."""


def drawn(colour: str, shape: str, draw: random.Random) -> Image.Image:
    """Return a picture of a shape, of random size and place."""
    width, height = draw.choice(SIDES), draw.choice(SIDES)
    picture = Image.new("RGB", (width, height), GREY)
    size = draw.randint(16, 24)
    left, top = draw.randint(0, width - size), draw.randint(0, height - size)
    box, pen = (left, top, left + size - 1, top + size - 1), ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle(box, fill=COLOURS[colour])
    else:
        corners = ((left, top + size - 1), (left + size - 1, top + size - 1), (left + size // 2, top))
        pen.polygon(corners, fill=COLOURS[colour])
    return picture


def row(answer: str, picture: str) -> dict[str, Any]:
    """Return the row of a picture, whose path starts at the folder of the rows' file."""
    question = [{"type": "image", "path": picture}, {"type": "text", "text": "What?"}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def question(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for RLVR: the user's message, and the answer as the reference answer."""
    asked, answer = row["messages"]
    return {"messages": [asked], "ground_truth": answer["content"]}


def write_shapes(folder: Path, rows: int, seed: int, held_out: int = HELD_OUT) -> None:
    """Write the rows and their pictures into a new folder, which replaces `folder` once it is complete."""
    draw = random.Random(seed)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "pictures").mkdir(parents=True)
    made = []
    for number in range(rows + held_out):
        colour, shape = draw.choice(list(COLOURS)), draw.choice(SHAPES)
        drawn(colour, shape, draw).save(partial / "pictures" / f"{number}.png")
        made.append(row(f"{colour} {shape}", f"pictures/{number}.png"))
    asked = [*map(question, made)]
    for name, some in {"train": made[:rows], "questions": asked[:rows], "heldout": asked[rows:]}.items():
        (partial / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in some), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1600)
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_shapes(given.folder, given.rows, given.seed, given.held_out)
