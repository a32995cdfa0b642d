"""Small prompt files in the formats of the official ones, with the rows that files of that kind go wrong on."""

import json
import os
from pathlib import Path

QUOTED = 'a "big" dog, isn\'t it'
FOREIGN = "ein Käfer im Gehäuse, 日本の猫 🐈"
TABBED = "left\tright"


def geneval(folder: Path) -> Path:
    rows = [(QUOTED, "counting"), ("", "colors"), (TABBED, "position"), (QUOTED, "counting"), (FOREIGN, "colors")]
    lines = [json.dumps({"tag": tag, "include": [{"class": "dog", "count": 1}], "prompt": text}) for text, tag in rows]
    return written(folder / "evaluation_metadata.jsonl", "\r\n".join(lines) + "\r\n")


def dpg_bench(folder: Path) -> Path:
    for name, text in {"10": QUOTED, "2": "", "COCOval2014000000000042": TABBED, "partiprompts9": FOREIGN}.items():
        written(folder / "prompts" / f"{name}.txt", text)
    written(folder / "prompts" / "whoops1.txt", QUOTED + "\r\n")
    return folder / "prompts"


def parti(folder: Path) -> Path:
    rows = [f'"{QUOTED}', "", "bond", f'"{QUOTED}', FOREIGN]
    lines = ["Prompt\tCategory\tChallenge\tNote", *(f'{text}\tAbstract\tBasic\ta "note' for text in rows)]
    return written(folder / "PartiPrompts.tsv", "\r\n".join(lines))


def coco(folder: Path) -> Path:
    captions = {7: [(30, "late"), (4, QUOTED + "\n")], 3: [], 9: [(12, TABBED)], 1: [(13, QUOTED)], 2: [(2, FOREIGN)]}
    content = {
        "images": [{"id": id, "file_name": f"COCO_val2014_{id:012d}.jpg"} for id in captions],
        "annotations": [{"image_id": i, "id": id, "caption": text} for i, own in captions.items() for id, text in own],
    }
    return written(folder / "annotations" / "captions_val2014.json", json.dumps(content))


def prompts(folder: Path) -> Path:
    return written(folder / "prompts.txt", "\r\n".join([QUOTED, "", TABBED, QUOTED, FOREIGN]))


SUITES = {"geneval": geneval, "dpg_bench": dpg_bench, "parti": parti, "coco": coco, "prompts": prompts}


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def official(name: str) -> Path | None:
    """The official file or folder, in SSD_BENCHMARKS or beside the checkout."""
    place = Path(os.environ.get("SSD_BENCHMARKS", Path(__file__).parents[2] / "shared" / "benchmarks"))
    names = {"geneval": "evaluation_metadata.jsonl", "dpg_bench": "prompts", "parti": "PartiPrompts.tsv"}
    path = place / name / names[name]
    return path if path.exists() else None
